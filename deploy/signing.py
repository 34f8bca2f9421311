"""An instruction to a node is signed by the server of the run; a node answers no other.

Flower's SuperLink passes on what any registered hospital sends, to another hospital too. So the server signs
what it asks: the run, the node, the time and each byte of the content. Nodes have its public key beforehand.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from plumbing.run.errors import UserError
from plumbing.run.files import write_whole

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from flwr.app import ConfigRecord, Context, Message, RecordDict

SIGNATURE = "signature"  # the record that has it, beside those that it signs


def key_of(file: Path, private: bool) -> Ed25519PrivateKey | Ed25519PublicKey:
    """The key in a file that openssl has written. Stop if it is another kind of file."""
    expected, key, content = Ed25519PrivateKey if private else Ed25519PublicKey, None, file.read_bytes()
    with contextlib.suppress(ValueError, TypeError):
        key = load_pem_private_key(content, None) if private else load_pem_public_key(content)
    if not isinstance(key, expected):
        raise UserError(f"{file}: expected the {'private' if private else 'public'} half of an Ed25519 key; "
                        "found something else: make one as step 2 of deploy/README.md does", 2)
    return key


def text_of(content: RecordDict, run: int, node: int) -> bytes:
    """What is signed: the ids of the run and the node, and a hash that Flower makes of all other records."""
    others = RecordDict({name: record for name, record in content.items() if name != SIGNATURE})
    return f"CleanFDG {run} {node} {others.object_id}".encode()


def sign(message: Message, key: Ed25519PrivateKey) -> None:
    """Add the time and the signature to a message of the server."""
    content = message.content
    content["asked"]["sent"] = time.time_ns()
    text = text_of(content, message.metadata.run_id, message.metadata.dst_node_id)
    content[SIGNATURE] = ConfigRecord({"ed25519": key.sign(text)})


def check_signed(message: Message, context: Context, key: Ed25519PublicKey, newest: Path) -> None:
    """Stop unless the server has signed this message for this node and this run. The file `newest` has the
    time of the newest one: an older one comes from somebody who sends it again."""
    try:
        signature = message.content[SIGNATURE]["ed25519"]
        key.verify(signature, text_of(message.content, context.run_id, context.node_id))
    except (KeyError, TypeError, InvalidSignature):
        raise UserError("an instruction came that the key of --server-key has not signed for this node and "
                        "run; it was not obeyed: look who sends it, or whether the run has --sign")
    sent = message.content["asked"]["sent"]
    if newest.exists() and sent < int(newest.read_text(encoding="utf-8")):
        raise UserError(f"an instruction came that is older than the newest one, whose time is in {newest}; "
                        "it was not obeyed: look who sends it, or whether the server's clock was set back")
    write_whole(newest, lambda file: file.write(str(sent).encode()))
