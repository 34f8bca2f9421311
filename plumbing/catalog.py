"""What is known of each image dataset: its official source, files, domains, classes and numbers of images.

Where a number comes from: officecaltech and pacs were counted in the archives themselves. VLCS was counted in
DomainBed's misc/vlcs_files.txt, Office-Home in published lists of its files, and both agree with the
literature (10,729 and 15,588). DomainNet was counted in its official lists, whose md5 is below. Two of them
could not be had: quickdraw_train.txt (quickdraw has 500 images of each class: 172,500 / 345, and 150 of each
in its test list) and real_train.txt, so the numbers of `real` in the subsets are not checked (nor could
FedGaLA's total of 38,556 be reproduced). Camelyon17's are those of WILDS' metadata.csv as tabulated by
others; they add up to its official splits. None: not checked, because not known for certain.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

OWN = "folder:"  # --dataset folder:PATH, images of one's own


@dataclass(frozen=True)
class Folders:
    """A dataset of image files."""

    files: dict[str, tuple[str, str | None]]  # pattern of the name of each file: its source, its md5 or None
    domains: dict[str, tuple[str, int | None]]  # domain: its folder (or its number in a table), its images
    classes: tuple[str, ...]  # in the order of their labels
    layout: str = "in_folders"  # the function in listings.py that knows domain and class of each image
    unpacked: str | None = None  # the folder that the official scripts unpack it to, in --archives or --data
    of_class: dict[str, tuple[int, ...]] = field(default_factory=dict)  # domain: each class's images

    @property
    def archive(self) -> str:
        """The pattern of its first file's name."""
        return next(iter(self.files))


OFFICEHOME = tuple("""
    Alarm_Clock Backpack Batteries Bed Bike Bottle Bucket Calculator Calendar Candles Chair Clipboards
    Computer Couch Curtains Desk_Lamp Drill Eraser Exit_Sign Fan File_Cabinet Flipflops Flowers Folder Fork
    Glasses Hammer Helmet Kettle Keyboard Knives Lamp_Shade Laptop Marker Monitor Mop Mouse Mug Notebook Oven
    Pan Paper_Clip Pen Pencil Postit_Notes Printer Push_Pin Radio Refrigerator Ruler Scissors Screwdriver
    Shelf Sink Sneakers Soda Speaker Spoon TV Table Telephone ToothBrush Toys Trash_Can Webcam
""".split())

# DomainNet's 345 classes, in the order of the numbers in its lists.
DOMAINNET = tuple("""
    aircraft_carrier airplane alarm_clock ambulance angel animal_migration ant anvil apple arm asparagus axe
    backpack banana bandage barn baseball baseball_bat basket basketball bat bathtub beach bear beard bed bee
    belt bench bicycle binoculars bird birthday_cake blackberry blueberry book boomerang bottlecap bowtie
    bracelet brain bread bridge broccoli broom bucket bulldozer bus bush butterfly cactus cake calculator
    calendar camel camera camouflage campfire candle cannon canoe car carrot castle cat ceiling_fan cello
    cell_phone chair chandelier church circle clarinet clock cloud coffee_cup compass computer cookie cooler
    couch cow crab crayon crocodile crown cruise_ship cup diamond dishwasher diving_board dog dolphin donut
    door dragon dresser drill drums duck dumbbell ear elbow elephant envelope eraser eye eyeglasses face fan
    feather fence finger fire_hydrant fireplace firetruck fish flamingo flashlight flip_flops floor_lamp
    flower flying_saucer foot fork frog frying_pan garden garden_hose giraffe goatee golf_club grapes grass
    guitar hamburger hammer hand harp hat headphones hedgehog helicopter helmet hexagon hockey_puck
    hockey_stick horse hospital hot_air_balloon hot_dog hot_tub hourglass house house_plant hurricane
    ice_cream jacket jail kangaroo key keyboard knee knife ladder lantern laptop leaf leg light_bulb lighter
    lighthouse lightning line lion lipstick lobster lollipop mailbox map marker matches megaphone mermaid
    microphone microwave monkey moon mosquito motorbike mountain mouse moustache mouth mug mushroom nail
    necklace nose ocean octagon octopus onion oven owl paintbrush paint_can palm_tree panda pants paper_clip
    parachute parrot passport peanut pear peas pencil penguin piano pickup_truck picture_frame pig pillow
    pineapple pizza pliers police_car pond pool popsicle postcard potato power_outlet purse rabbit raccoon
    radio rain rainbow rake remote_control rhinoceros rifle river roller_coaster rollerskates sailboat
    sandwich saw saxophone school_bus scissors scorpion screwdriver sea_turtle see_saw shark sheep shoe shorts
    shovel sink skateboard skull skyscraper sleeping_bag smiley_face snail snake snorkel snowflake snowman
    soccer_ball sock speedboat spider spoon spreadsheet square squiggle squirrel stairs star steak stereo
    stethoscope stitches stop_sign stove strawberry streetlight string_bean submarine suitcase sun swan
    sweater swing_set sword syringe table teapot teddy-bear telephone television tennis_racquet tent
    The_Eiffel_Tower The_Great_Wall_of_China The_Mona_Lisa tiger toaster toe toilet tooth toothbrush
    toothpaste tornado tractor traffic_light train tree triangle trombone truck trumpet t-shirt umbrella
    underwear van vase violin washing_machine watermelon waterslide whale wheel windmill wine_bottle
    wine_glass wristwatch yoga zebra zigzag
""".split())

# The classes of FedBN (Li et al., ICLR 2021) and FDSE.
DOMAINNET10 = (
    "bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass",
    "zebra",
)

# The classes of FedGaLA, Sec. 4, which has them from DARLING (Zhang et al., "Towards Unsupervised Domain
# Generalization", CVPR 2022). FedGaLA's repository has no list of them.
DOMAINNET20 = (
    "zigzag", "tiger", "tornado", "flower", "giraffe", "toaster", "hexagon", "watermelon", "grass",
    "hamburger", "blueberry", "violin", "fish", "sun", "broccoli", "The_Eiffel_Tower", "horse", "train",
    "bird", "bee",
)

DOMAINNET_URL = "http://csr.bu.edu/ftp/visda/2019/multi-source/"

# In which folder below that address <domain>.zip of the cleaned version is.
DOMAINNET_ZIPS = {
    "clipart": "groundtruth/",
    "infograph": "",
    "painting": "groundtruth/",
    "quickdraw": "",
    "real": "",
    "sketch": "",
}

# md5 of <domain>.zip, <domain>_train.txt and <domain>_test.txt as downloaded from the official addresses by
# datasets-mila/datasets--domainnet; the lists of the cleaned version, except the two longest, were compared.
DOMAINNET_MD5 = {
    "clipart": (
        "cd0d8f2d77a4e181449b78ed62bccf1e",
        "b4349693a7f9c05c53955725c47ed6cb",
        "f5ddbcfd657a3acf9d0f7da10db22565",
    ),
    "infograph": (
        "720380b86f9e6ab4805bb38b6bd135f8",
        "379b50054f4ac2018dca4f89421b92d9",
        "779626b50869edffe8ea6941c3755c71",
    ),
    "painting": (
        "1ae32cdb4f98fe7ab5eb0a351768abfd",
        "7db0e7ca73ad9982f6e1f7f3ef372c0a",
        "232b35dc53f26d414686ae579e38d9b5",
    ),
    "quickdraw": (
        "bdc1b6f09f277da1a263389efe0c7a66",
        "b732ced3939ac8efdd8c0a889dca56cc",
        "c1a828fdfe216fb109f1c0083a252c6f",
    ),
    "real": (
        "dcc47055e8935767784b7162e7c7cca6",
        "8ebf02c2075fadd564705f0dc7cd6291",
        "6098816791c3ebed543c71ffa11b9054",
    ),
    "sketch": (
        "658d8009644040ff7ce30bb2e820850f",
        "1233bd18aa9a8a200bf4cecf1c34ef3e",
        "d8a222e4672cfd585298aa14d02ea441",
    ),
}


def domainnet(classes: tuple[str, ...], images: tuple[int | None, ...]) -> Folders:
    """DomainNet, cleaned version, or a part of its classes: the images that the official lists name.

    586,575 images, as in DomainBed and FedSR; the 569,010 of other papers are of the version that was not
    cleaned.
    """
    files = {}
    for domain, (archive, train, test) in DOMAINNET_MD5.items():
        files[f"{domain}.zip"] = (f"{DOMAINNET_URL}{DOMAINNET_ZIPS[domain]}{domain}.zip", archive)
        files[f"{domain}_train.txt"] = (f"{DOMAINNET_URL}domainnet/txt/{domain}_train.txt", train)
        files[f"{domain}_test.txt"] = (f"{DOMAINNET_URL}domainnet/txt/{domain}_test.txt", test)
    domains = {}
    for domain, count in zip(DOMAINNET_MD5, images):
        domains[domain] = (domain, count)
    return Folders(files, domains, classes, "in_lists", "domainnet")


LILA = "https://storage.googleapis.com/public-datasets-lila/caltechcameratraps"
CODALAB = "https://worksheets.codalab.org/rest/bundles"

FOLDERS = {
    "officecaltech": Folders(
        files={
            "Office_Caltech_DA_Dataset*.zip":
                ("https://github.com/ChristophRaab/Office_Caltech_DA_Dataset/archive/91ad5c3.zip", None),
        },
        domains={
            "amazon": ("amazon", 958),
            "caltech": ("Caltech", 1123),
            "dslr": ("dslr", 157),
            "webcam": ("webcam", 295),
        },
        classes=(
            "backpack", "bike", "calculator", "headphones", "keyboard", "laptop_computer", "monitor", "mouse",
            "mug", "projector",
        ),
        of_class={
            "amazon": (92, 82, 94, 99, 100, 100, 99, 100, 94, 98),
            "caltech": (151, 110, 100, 138, 85, 128, 133, 94, 87, 97),
            "dslr": (12, 21, 12, 13, 10, 24, 22, 12, 8, 23),
            "webcam": (29, 21, 31, 27, 27, 30, 43, 30, 27, 30),
        },
    ),
    "pacs": Folders(
        files={
            "Homework3-PACS*.zip":
                ("https://github.com/MachineLearning2020/Homework3-PACS/archive/d586a6c.zip", None),
        },
        domains={
            "art_painting": ("art_painting", 2048),
            "cartoon": ("cartoon", 2344),
            "photo": ("photo", 1670),
            "sketch": ("sketch", 3929),
        },
        classes=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
        of_class={
            "art_painting": (379, 255, 285, 184, 201, 295, 449),
            "cartoon": (389, 457, 346, 135, 324, 288, 405),
            "photo": (189, 202, 182, 186, 199, 280, 432),
            "sketch": (772, 740, 753, 608, 816, 80, 160),
        },
    ),
    # As DomainBed packs it.
    "vlcs": Folders(
        files={"VLCS.tar.gz": ("https://drive.google.com/uc?id=1skwblH1_okBwxWxmRsp9_qi15hyPpxg8", None)},
        domains={
            "caltech101": ("Caltech101", 1415),
            "labelme": ("LabelMe", 2656),
            "sun09": ("SUN09", 3282),
            "voc2007": ("VOC2007", 3376),
        },
        classes=("bird", "car", "chair", "dog", "person"),
        unpacked="VLCS",
    ),
    "officehome": Folders(
        files={
            "OfficeHomeDataset_10072016.zip":
                ("https://drive.google.com/uc?id=1uY0pj7oFsjMxRwaD3Sxy0jgel0fsYXLC", None),
        },
        domains={
            "art": ("Art", 2427),
            "clipart": ("Clipart", 4365),
            "product": ("Product", 4439),
            "real_world": ("Real World", 4357),
        },
        classes=OFFICEHOME,
        unpacked="OfficeHomeDataset_10072016",
    ),
    # The part of the ECCV 2018 images of Caltech Camera Traps that DomainBed's script takes since June 2024.
    # Earlier forms of that script gave 24,788 images (9,767, 4,020, 6,122 and 4,879; the number in papers),
    # then 24,330. What today's gives could not be counted without its files, so nothing is checked.
    "terrainc": Folders(
        files={
            "eccv_18_all_images_sm.tar.gz": (f"{LILA}/eccv_18_all_images_sm.tar.gz", None),
            "eccv_18_annotations.tar.gz": (f"{LILA}/eccv_18_annotations.tar.gz", None),
        },
        domains={
            "location_38": ("location_38", None),
            "location_43": ("location_43", None),
            "location_46": ("location_46", None),
            "location_100": ("location_100", None),
        },
        classes=(
            "bird", "bobcat", "cat", "coyote", "dog", "empty", "opossum", "rabbit", "raccoon", "squirrel",
        ),
        layout="in_camera_traps",
        unpacked="terra_incognita",
    ),
    "domainnet": domainnet(DOMAINNET, (48129, 51605, 72266, 172500, 172947, 69128)),
    "domainnet10": domainnet(DOMAINNET10, (2618, 3070, 3069, 5000, None, 2684)),
    "domainnet20": domainnet(DOMAINNET20, (3855, 5176, 5586, 10000, None, 4301)),
    # WILDS v1.0.
    "camelyon17": Folders(
        files={
            "camelyon17_v1*.tar.gz": (f"{CODALAB}/0xe45e15f39fb54e9d9e919556af67aabe/contents/blob/", None),
        },
        domains={
            "hospital_0": ("0", 59436),
            "hospital_1": ("1", 34904),
            "hospital_2": ("2", 85054),
            "hospital_3": ("3", 129838),
            "hospital_4": ("4", 146722),
        },
        classes=("normal", "tumor"),
        layout="in_camelyon17",
        unpacked="camelyon17_v1.0",
    ),
    # WILDS v2.0. FedCiR keeps "ten classes of samples in ten of the cameras that have the largest data
    # volume" because most images show nothing; which ones is not published. Domains and classes are therefore
    # found in metadata.csv.
    "iwildcam": Folders(
        files={"iwildcam_v2*.tar.gz": (f"{CODALAB}/0x6313da2b204647e79a14b468131fcd64/contents/blob/", None)},
        domains={},
        classes=(),
        layout="in_iwildcam",
        unpacked="iwildcam_v2.0",
    ),
}


# Images of one's own: PATH/<domain>/<class>/, whose names are those of the domains and classes.
OWN_IMAGES = Folders(files={}, domains={}, classes=(), layout="in_own_folders")


def own_folder(dataset: str) -> Path | None:
    """PATH of `folder:PATH`; None for the datasets above."""
    if dataset.startswith(OWN):
        return Path(dataset.removeprefix(OWN))
    return None


def source_of(dataset: str) -> Folders:
    """What is known of a dataset of image files; KeyError if it is none."""
    if own_folder(dataset):
        return OWN_IMAGES
    return FOLDERS[dataset]


def short_name(dataset: str) -> str:
    """The name of a dataset in the names of files: of `folder:PATH` that of the folder, without signs that a
    shell or a file system may take for others."""
    folder = own_folder(dataset)
    if folder is None:
        return dataset
    return re.sub(r"[^A-Za-z0-9._-]+", "_", folder.name)[:40] or "folder"
