#!/usr/bin/env bash
# What waits for a GPU, in one call of at most fifteen minutes: docs/gpu.md has the steps.
#
#   bash bench/gpu.sh --archives FOLDER              # everything below $OUT, or runs/gpu-<time>
#   bash bench/gpu.sh --device cpu --quick           # every step's command at tiny scale, to see that it runs
#
# --archives FOLDER   folder with the archive of Office-Caltech10; without it the steps that need it are left out
# --data FOLDER       folder of the decoded cache (data)
# --device NAME       cuda (default), or cpu with --quick
# --seconds N         for all of it (900)
# --tables FOLDER     tables of the last step (tables)
# --quick             digits in the place of Office-Caltech10, smoke scale, one round of each figure
#
# Each step has a limit, and whatever becomes of it the next one begins. Exit code 0 if all that was begun went
# well or came to its limit, 1 if a step failed, 2 for bad usage.
set -u
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python}
device=cuda archives="" data=data total=900 tables=tables quick=""

usage() {
    echo "gpu.sh: $1 (the first lines of bench/gpu.sh explain every flag)" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
        --quick) quick=yes; shift; continue ;;
        --archives|--data|--device|--seconds|--tables) [ $# -gt 1 ] || usage "$1 needs a value" ;;
        *) usage "$1 is no flag" ;;
    esac
    case $1 in
        --archives) archives=$2 ;;
        --data) data=$2 ;;
        --device) device=$2 ;;
        --seconds) total=$2 ;;
        --tables) tables=$2 ;;
    esac
    shift 2
done
[[ $total =~ ^[1-9][0-9]*$ ]] || usage "--seconds is $total; expected a number of seconds"
[[ $device == cpu || $device =~ ^cuda(:[0-9]+)?$ ]] || usage "--device is $device; expected cuda, cuda:N or cpu"
[ -z "$archives" ] || [ -d "$archives" ] || usage "--archives $archives is no folder"
"$python" -c "import sys; from plumbing.settings import choose_device; from plumbing.errors import Stop
try: choose_device('$device')
except Stop as stop: sys.exit(f'gpu.sh: {stop}')" || exit 2

out=${OUT:-runs/gpu-$(date +%Y%m%d-%H%M%S)}
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
summary=$out/summary.txt
failed=0
began=$SECONDS
: > "$summary"
touch "$out/.begun"

note() {
    echo "$1" | tee -a "$summary"
}

# step NAME LIMIT COMMAND...: runs it for at most LIMIT seconds, and no longer than all may take.
step() {
    local name=$1 limit=$2 start=$SECONDS code
    shift 2
    local left=$((total - (SECONDS - began) - 10))
    [ "$limit" -lt "$left" ] || limit=$left
    if [ "$limit" -lt 5 ]; then
        note "$name: not begun, the time is over"
        return
    fi
    echo "\$ $*" > "$out/$name.log"
    { timeout --signal=TERM --kill-after=20 "$limit" "$@" >> "$out/$name.log" 2>&1; } 2> /dev/null
    code=$?
    case $code in
        0) note "$name: done in $((SECONDS - start)) s" ;;
        124|137|143) note "$name: ended at its limit of $limit s, what went on then is no failure; $name.log has what it did" ;;
        5) note "$name: there was nothing to do" ;;
        *) note "$name: failed with exit code $code after $((SECONDS - start)) s: $(tail -n 1 "$out/$name.log" | cut -c1-200)"
           failed=1 ;;
    esac
}

folders=(--data "$data")
[ -z "$archives" ] || folders+=(--archives "$archives")
records=(--record "$out/runs.jsonl" --no-figures)
gpus=()
on_device=(--device "$device")
if [ "$device" != cpu ]; then
    number=${device#cuda}
    number=${number#:}
    gpus=(--gpus "${number:-0}")
    "$python" -c "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name('$device'))" > "$out/gpu.txt" 2>&1
    nvidia-smi >> "$out/gpu.txt" 2>&1
fi

# 1. What needs a device.
few=()
[ -z "$quick" ] || few=(-k "fedavg or fdse")
step tests 120 env GPU_TESTS_ON="$device" "$python" -m pytest -m gpu -n 0 -vv -rs -p no:cacheprovider --tb=short \
    tests/test_errors.py tests/test_augment.py tests/test_gpu.py "${few[@]}"

# 2. Seconds of a round beside bare arithmetic.
has_office=""
if [ -n "$archives" ] && [ -n "$(find "$archives" -maxdepth 1 -iname 'Office*Caltech*' -print -quit)" ]; then
    has_office=yes
fi
if [ -n "$has_office" ]; then
    size=224
    [ -z "$quick" ] || size=64
    step rounds 150 "$python" -m bench.bench "${folders[@]}" --size "$size" --rounds 1 "${on_device[@]}" --out "$out/rounds.json"
else
    note "rounds: left out, the archive of Office-Caltech10 is not in --archives"
fi

# 3. Whole runs, recorded.
for method in fedavg fdse; do
    if [ -n "$quick" ]; then
        step "$method" 120 "$python" $method.py --dataset digits --scale smoke "${folders[@]}" "${on_device[@]}" \
            --out "$out/runs/$method" "${records[@]}"
    elif [ -n "$has_office" ]; then
        step "$method" 420 "$python" $method.py --dataset officecaltech --rounds 500 --test-rounds best "${folders[@]}" \
            "${on_device[@]}" --out "$out/runs/$method" "${records[@]}"
    else
        note "$method: left out, the archive of Office-Caltech10 is not in --archives"
    fi
done

# 4. Cells of FDSE's Table 1, the cheapest first, until the time is over.
if [ -n "$quick" ]; then
    step table 300 "$python" reproduce_tables.py --run --scale smoke "${gpus[@]}" "${folders[@]}" --tables "$tables" \
        --records "$out/runs.jsonl" --out "$out/results"
elif [ -n "$has_office" ]; then
    step table 600 "$python" reproduce_tables.py --run --only fdse-1 --scale paper "${gpus[@]}" "${folders[@]}" \
        --records "$out/runs.jsonl" --out "$out/results"
else
    note "table: left out, the archive of Office-Caltech10 is not in --archives"
fi

# What the runs of the tables have written, without their states.
for folder in runs/*/; do
    if [ "$folder/settings.json" -nt "$out/.begun" ] && [ "$(cd "$folder" && pwd)" != "$out" ]; then
        mkdir -p "$out/$folder"
        cp "$folder"/*.json "$folder"/*.jsonl "$folder"/log.txt "$out/$folder" 2>/dev/null
    fi
done
rm -f "$out/.begun"
recorded=0
[ ! -f "$out/runs.jsonl" ] || recorded=$(wc -l < "$out/runs.jsonl")
note "$recorded runs recorded, $((SECONDS - began)) s, everything in $out"
exit $failed
