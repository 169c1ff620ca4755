"""Models of the Hugging Face hub: what names one, and what of it is fetched, the weights last."""

from __future__ import annotations

import re
from pathlib import Path

from wedlm_jax.errors import UserError
from wedlm_jax.hf import peft
from wedlm_jax.hf.config import from_hf, read_json
from wedlm_jax.hf.shards import INDEX_FILE
from wedlm_jax.hf.tokenizer import CHAT_TEMPLATES, GENERATION_FILE, TOKENIZER_FILES
from wedlm_jax.model.handle import CALIBRATION_FILE, WINDOWS_FILE

DESCRIPTION = (
    "config.json", GENERATION_FILE, CALIBRATION_FILE, WINDOWS_FILE, INDEX_FILE, *TOKENIZER_FILES, f"{CHAT_TEMPLATES}/*.jinja",
    peft.PEFT_FILE,
)  # fmt: skip
WEIGHTS = "*.safetensors"
_ID = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
_MEND = "name the repository of the original weights as safetensors"


def is_hub_id(path: str | Path) -> bool:
    """Whether `path` reads as `owner/name`: text, two parts, and no local directory called `owner`."""
    if not isinstance(path, str) or not re.fullmatch(_ID, path):
        return False
    owner = path.partition("/")[0]
    return owner != "runs" and not Path(owner).exists()


def how_to_fetch(path: str | Path) -> str:
    """The command that fetches what may be meant as of the hub: what `is_hub_id` would take but for a folder called `owner`, and
    `owner/name@revision`. "" of any other path."""
    named = re.fullmatch(rf"({_ID})(?:@([\w./-]+))?", path) if isinstance(path, str) else None
    if named is None or named[1].startswith("runs/"):
        return ""
    revision = "" if named[2] is None else f" --revision {named[2]}"
    return f"hf download {named[1]}{revision} --local-dir DIR"


def fetch_description(hub_id: str) -> Path:
    """A folder with all of a hub's model but its weights: megabytes.

    Raises:
      UserError: it cannot be fetched, or config.json is not there or asks for what is not implemented.
    """
    directory = _fetch(hub_id, DESCRIPTION)
    file = directory / "config.json"
    if (directory / peft.PEFT_FILE).is_file() and not file.is_file():
        raise UserError(
            f"{hub_id}: an adapter and no model; load its base, and beside it what hf download {hub_id} --local-dir DIR fetches: "
            "--model BASE --adapter DIR"
        )
    if not file.is_file():
        raise UserError(f"{hub_id}: no config.json, as in repositories of GGUF files; {_MEND}")
    from_hf(read_json(file), Path(hub_id) / file.name)
    return directory


def fetch_model(hub_id: str) -> Path:
    """A folder with the whole model. Its weights, gigabytes, are fetched once its config.json is known to be implemented.

    Raises:
      UserError: as `fetch_description`, or it has no safetensors.
    """
    fetch_description(hub_id)
    directory = _fetch(hub_id, (WEIGHTS, *DESCRIPTION))
    if not any(directory.glob(WEIGHTS)):
        raise UserError(f"{hub_id}: no safetensors (GGUF, pickled or, offline, never fetched); {_MEND}")
    return directory


def _fetch(hub_id: str, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        # A pattern without a slash matches in folders too, as of checkpoints that a trainer left there: gigabytes each.
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns), ignore_patterns=[f"*/{WEIGHTS}"]))
    except GatedRepoError:
        raise UserError(
            f"{hub_id}: its owner asks you to accept terms: do so at https://huggingface.co/{hub_id}, then log in by hf auth "
            "login, or set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{hub_id}: no such directory, and no such repository of the Hugging Face hub that you may read; mend the name, or, "
            "where it is private, log in by hf auth login, or set HF_TOKEN"
        ) from None
    except Exception as error:  # the hub's own errors, and those of three network layers below it
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{hub_id}: no such directory, and not fetched from the Hugging Face hub ({reason})") from None
