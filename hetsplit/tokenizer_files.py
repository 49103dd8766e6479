"""What tokenizer files say, resolved to one `Vocabulary`; and the reader of Hugging Face folders.

Owns the byte string behind every token, and the set of ids that end a text. Knows no request and no stream
(`tokenizer` does), and no GGUF (`tokenizer_gguf` does). Invariant: one vocabulary written in either format gives the
same pieces, the same ids for a text, and the same stop set.

Source: the `tokenizers` JSON format.
"""

import json
import logging
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from hetsplit.errors import ConfigError

log = logging.getLogger(__name__)

# Tokens that end a turn or a text in some family. One that is in a vocabulary as a special token always ends.
END_TOKENS = (
    "<|endoftext|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "</s>",
    "<|end|>",
    "<end_of_turn>",
    "<eos>",
    "<|eot|>",
    "<|end_of_turn|>",
)
NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
_FOLDER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "chat_template.jinja",
)
IDS_MAX = 2**22
SPACE = "\u2581"  # SentencePiece writes a space so


class Pieces:
    """The byte string that each token id stands for, None where no token has that id; one run of memory for all."""

    def __init__(self, pieces: Iterable[bytes | None]) -> None:
        self._absent: set[int] = set()
        self._ends = array("Q")
        joined = bytearray()
        for i, piece in enumerate(pieces):
            if piece is None:
                self._absent.add(i)
            else:
                joined += piece
            self._ends.append(len(joined))
        self._joined = bytes(joined)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, i: int) -> bytes | None:
        end = self._ends[i]
        return None if i in self._absent else self._joined[self._ends[i - 1] if i else 0 : end]

    def __iter__(self) -> Iterator[bytes | None]:
        return (self[i] for i in range(len(self)))


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """One model's tokens.

    `backend` turns text into ids, parses special tokens written in the text, and adds none. `prefix` is what goes in
    front of a text (BOS, or nothing). `strip_space`: encoding puts a space before a text, which decoding takes off.
    `names` holds bos_token, eos_token ... as the chat template spells them.
    """

    backend: tokenizers.Tokenizer
    pieces: Pieces
    special: frozenset[int]
    prefix: tuple[int, ...]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    strip_space: bool
    template: str | None
    names: Mapping[str, str] = field(default_factory=dict)


# --- the byte string behind a token ----------------------------------------------------------------------------------


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_ALPHABET = _byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Spelling:
    """How a vocabulary spells bytes: GPT-2's alphabet, or SentencePiece's (with `<0x0A>` byte tokens)."""

    byte_level: bool
    byte_tokens: bool = False
    strip_space: bool = False

    def piece(self, token: str) -> bytes:
        """The bytes of an ordinary token."""
        if self.byte_level:
            try:
                return bytes(_ALPHABET[letter] for letter in token)
            except KeyError:  # a token that was added as plain text
                return token.encode()
        if self.byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(SPACE, " ").encode()

    def added(self, token: str) -> bytes:
        """The bytes of a token that is matched in the raw text, before any alphabet applies."""
        return token.encode() if self.byte_level else token.replace(SPACE, " ").encode()


def _spelling_of(decoder: Mapping[str, Any] | None, file: Path) -> Spelling:
    """The spelling that a tokenizer.json's decoder undoes; ConfigError for one that is not built."""
    steps = (decoder.get("decoders", [decoder]) if decoder else []) or []
    kinds = [str(step.get("type")) for step in steps]
    if "ByteLevel" in kinds:
        return Spelling(byte_level=True)
    if "Metaspace" in kinds or ("Replace" in kinds and SPACE in json.dumps(steps, ensure_ascii=False)):
        return Spelling(False, "ByteFallback" in kinds, any(map(_takes_space_off, steps)))
    raise ConfigError(f"{file}: decoder {kinds or None} is not supported; allowed: ByteLevel, or SentencePiece's")


def _takes_space_off(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True) is not False
    return step["type"] == "Strip" and step.get("content") == " " and step.get("start", 0) > 0


def end_ids(named: Sequence[int], ids: Mapping[str, int], special: frozenset[int]) -> tuple[int, ...]:
    """Named ids first, then every well-known end token that is special here; each once."""
    known = [ids[token] for token in END_TOKENS if ids.get(token) in special]
    return tuple(dict.fromkeys([*named, *known]))


# --- Hugging Face folder ---------------------------------------------------------------------------------------------


def read_folder(folder: Path) -> Vocabulary | None:
    """The tokenizer of a Hugging Face folder, or None when the folder has no tokenizer file at all.

    Raises ConfigError naming the file that is missing, corrupt or of an unsupported kind.
    """
    file = folder / "tokenizer.json"
    if not file.exists():
        others = [name for name in _FOLDER_FILES if (folder / name).exists()]
        if others:
            raise ConfigError(f"{file} is missing though {others[0]} is there; hetsplit reads tokenizer.json alone")
        return None
    document = _read_json(file)
    config = _read_json(folder / "special_tokens_map.json", {}) | _read_json(folder / "tokenizer_config.json", {})
    backend = _load_backend(file)
    ids = backend.get_vocab(with_added_tokens=True)
    names = {key: _token_name(config[key], key, folder) for key in NAMED if config.get(key) is not None}
    named = {key: ids[name] for key, name in names.items() if key in ("bos_token", "eos_token") and name in ids}
    if "eos_token" in names and "eos_token" not in named:
        log.warning("%s: eos_token %r is not in tokenizer.json and is ignored", folder, names["eos_token"])
    backend.add_special_tokens([names[key] for key in named])
    spelling = _spelling_of(document.get("decoder"), file)
    pieces, special = _folder_pieces(backend, ids, spelling)
    bos_id = named.get("bos_token")
    return Vocabulary(
        backend=backend,
        pieces=pieces,
        special=special,
        prefix=_folder_prefix(backend, config.get("add_bos_token"), bos_id, folder),
        bos_id=bos_id,
        eos_ids=end_ids([named["eos_token"]] if "eos_token" in named else [], ids, special),
        strip_space=spelling.strip_space,
        template=_folder_template(folder, config.get("chat_template")),
        names=names,
    )


def _read_json(file: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    if default is not None and not file.exists():
        return default
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{file} holds a {type(document).__name__}; allowed: a JSON object")
    return document


def _load_backend(file: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for every fault of the file
        raise ConfigError(f"{file} is not a tokenizer: {error}") from error
    backend.no_truncation()  # a training setting that some files carry; it would cut prompts silently
    backend.no_padding()
    return backend


def _token_name(value: object, key: str, folder: Path) -> str:
    name = value.get("content") if isinstance(value, dict) else value
    if not isinstance(name, str):
        raise ConfigError(f"{folder}/tokenizer_config.json: {key} is {value!r}; allowed: a token's text")
    return name


def _folder_pieces(
    backend: tokenizers.Tokenizer, ids: Mapping[str, int], spelling: Spelling
) -> tuple[Pieces, frozenset[int]]:
    last = max(ids.values(), default=-1)
    if last >= IDS_MAX:
        raise ConfigError(f"tokenizer.json has the token id {last}; allowed: 0 to {IDS_MAX - 1}")
    pieces: list[bytes | None] = [None] * (last + 1)
    for token, i in ids.items():
        pieces[i] = spelling.piece(token)
    added = backend.get_added_tokens_decoder()
    for i, entry in added.items():
        pieces[i] = entry.content.encode() if entry.special else spelling.added(entry.content)
    return Pieces(pieces), frozenset(i for i, entry in added.items() if entry.special)


def _folder_prefix(backend: tokenizers.Tokenizer, add_bos: object, bos_id: int | None, folder: Path) -> tuple[int, ...]:
    """`add_bos_token` decides where it is given; else what the post-processor puts before a text."""
    if isinstance(add_bos, bool):
        if add_bos and bos_id is None:
            raise ConfigError(f"{folder}: add_bos_token is true but bos_token is not in tokenizer.json")
        return (bos_id,) if add_bos and bos_id is not None else ()
    probe = backend.encode("a")
    mask = probe.special_tokens_mask
    return tuple(probe.ids[: mask.index(0) if 0 in mask else 0])


def _folder_template(folder: Path, configured: object) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} is not readable text: {error}") from error
    if isinstance(configured, list):
        named = {entry.get("name"): entry.get("template") for entry in configured if isinstance(entry, dict)}
        configured = named.get("default")
    if configured is not None and not isinstance(configured, str):
        raise ConfigError(f"{folder}/tokenizer_config.json: chat_template is a {type(configured).__name__}, not text")
    return configured
