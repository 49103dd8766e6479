"""What tokenizer files say: a Hugging Face folder or GGUF metadata, resolved to one `Vocabulary`.

Owns the spellings of both formats, the byte string behind every token, the pre-tokenizers that GGUF names by a word,
and the set of ids that end a text. Knows no request and no stream: `tokenizer` does. Invariant: one vocabulary written
in either format gives the same pieces, the same ids for a text, and the same stop set.

Sources: the `tokenizers` JSON format; the GGUF specification's `tokenizer.ggml.*` keys, where a pre-tokenizer's name
stands for the regular expressions that llama.cpp runs under it.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

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
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
_FOLDER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "chat_template.jinja",
)
IDS_MAX = 2**22
MERGED_MAX = 256
_SPACE = "\u2581"  # SentencePiece writes a space so


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """One model's tokens. `pieces[i]` is the byte string token `i` stands for; None where no token has that id.

    `backend` turns text into ids, parses special tokens written in the text, and adds none. `prefix` is what goes in
    front of a text (BOS, or nothing). `strip_space`: encoding puts a space before a text, which decoding takes off.
    `names` holds bos_token, eos_token ... as the chat template spells them.
    """

    backend: tokenizers.Tokenizer
    pieces: tuple[bytes | None, ...]
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
class _Spelling:
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
        return token.replace(_SPACE, " ").encode()

    def added(self, token: str) -> bytes:
        """The bytes of a token that is matched in the raw text, before any alphabet applies."""
        return token.encode() if self.byte_level else token.replace(_SPACE, " ").encode()


def _spelling_of(decoder: Mapping[str, Any] | None, file: Path) -> _Spelling:
    """The spelling that a tokenizer.json's decoder undoes; ConfigError for one that is not built."""
    steps = (decoder.get("decoders", [decoder]) if decoder else []) or []
    kinds = [str(step.get("type")) for step in steps]
    if "ByteLevel" in kinds:
        return _Spelling(byte_level=True)
    if "Metaspace" in kinds or ("Replace" in kinds and _SPACE in json.dumps(steps, ensure_ascii=False)):
        return _Spelling(False, "ByteFallback" in kinds, any(map(_takes_space_off, steps)))
    raise ConfigError(f"{file}: decoder {kinds or None} is not supported; allowed: ByteLevel, or SentencePiece's")


def _takes_space_off(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True) is not False
    return step["type"] == "Strip" and step.get("content") == " " and step.get("start", 0) > 0


def _end_ids(named: Sequence[int], ids: Mapping[str, int], special: frozenset[int]) -> tuple[int, ...]:
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
    names = {key: _token_name(config[key], key, folder) for key in _NAMED if config.get(key) is not None}
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
        eos_ids=_end_ids([named["eos_token"]] if "eos_token" in named else [], ids, special),
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
    backend: tokenizers.Tokenizer, ids: Mapping[str, int], spelling: _Spelling
) -> tuple[tuple[bytes | None, ...], frozenset[int]]:
    last = max(ids.values(), default=-1)
    if last >= IDS_MAX:
        raise ConfigError(f"tokenizer.json has the token id {last}; allowed: 0 to {IDS_MAX - 1}")
    pieces: list[bytes | None] = [None] * (last + 1)
    for token, i in ids.items():
        pieces[i] = spelling.piece(token)
    added = backend.get_added_tokens_decoder()
    for i, entry in added.items():
        pieces[i] = entry.content.encode() if entry.special else spelling.added(entry.content)
    return tuple(pieces), frozenset(i for i, entry in added.items() if entry.special)


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


# --- GGUF metadata ---------------------------------------------------------------------------------------------------

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type


@dataclass(frozen=True)
class _PreTokenizer:
    """`patterns` split a text in turn; `whole`: a piece that is a token stays so; `nfc`: text is composed first."""

    patterns: tuple[str, ...]
    whole: bool = False
    add_bos: bool = False
    nfc: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_EDGE = r"[^\r\n\p{L}\p{N}]?"
_LLAMA3 = _PreTokenizer((rf"{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",), whole=True, add_bos=True)
_QWEN2 = _PreTokenizer((rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",), nfc=True)
_PRE_TOKENIZERS = {
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _PreTokenizer((_GPT2,)),
    "smollm": _PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _PreTokenizer(
        (
            rf"{_EDGE}{_UPPER}*{_LOWER}+|{_EDGE}{_UPPER}+{_LOWER}*|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}",
        ),
        whole=True,
        add_bos=True,
    ),
}


def read_gguf_metadata(metadata: Mapping[str, Any], source: str = "GGUF") -> Vocabulary | None:
    """The tokenizer in a GGUF file's metadata, or None when the file carries none. `source` names it in errors.

    Raises ConfigError naming the key that is missing, malformed, or has a value that is not supported.
    """
    model = metadata.get("tokenizer.ggml.model", "none")
    if model in ("none", "no_vocab"):
        return None
    if model not in ("gpt2", "llama"):
        raise ConfigError(f"{source}: tokenizer.ggml.model {model!r} is not supported; allowed: 'gpt2', 'llama'")
    keys = _Keys(metadata, source)
    tokens = keys.strings("tokens")
    types = keys.numbers("token_type", len(tokens), [NORMAL] * len(tokens))
    pre = keys.pre_tokenizer() if model == "gpt2" else None
    adds_space = pre is None and keys.flag("add_space_prefix", True)
    backend = keys.build(lambda: _byte_level(keys, tokens, pre) if pre else _sentence_piece(keys, tokens, types))
    if adds_space:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    special = frozenset(i for i, kind in enumerate(types) if kind in (CONTROL, UNKNOWN))
    named = {key: i for key in _NAMED if (i := keys.token_id(f"{_LONG_NAMES.get(key, key)}_id", tokens)) is not None}
    ends = [named.get("eos_token"), *(keys.token_id(f"{key}_token_id", tokens) for key in ("eot", "eom"))]
    eos_ids = _end_ids([i for i in ends if i is not None], {token: i for i, token in enumerate(tokens)}, special)
    special |= {i for i in (named.get("bos_token"), *eos_ids) if i is not None}
    matched = [i for i, kind in enumerate(types) if i in special or kind == USER_DEFINED]
    backend.add_tokens([AddedToken(tokens[i], special=i in special, normalized=False) for i in matched if tokens[i]])
    return Vocabulary(
        backend=backend,
        pieces=_gguf_pieces(tokens, types, special, _Spelling(pre is not None)),
        special=special,
        prefix=keys.prefix(named.get("bos_token"), default=pre is None or pre.add_bos),
        bos_id=named.get("bos_token"),
        eos_ids=eos_ids,
        strip_space=adds_space,
        template=keys.template(),
        names={key: tokens[i] for key, i in named.items()},
    )


_LONG_NAMES = {"unk_token": "unknown_token", "pad_token": "padding_token"}


def _gguf_pieces(
    tokens: Sequence[str], types: Sequence[int], special: frozenset[int], spelling: _Spelling
) -> tuple[bytes | None, ...]:
    bytes_too = _Spelling(spelling.byte_level, byte_tokens=True)

    def piece(i: int, token: str, kind: int) -> bytes | None:
        if i in special:
            return token.encode()
        if kind in (USER_DEFINED, UNUSED):
            return spelling.added(token) if kind == USER_DEFINED else None
        return (bytes_too if kind == BYTE else spelling).piece(token)

    return tuple(piece(i, token, kind) for i, (token, kind) in enumerate(zip(tokens, types, strict=True)))


def _byte_level(keys: "_Keys", tokens: Sequence[str], pre: _PreTokenizer) -> tokenizers.Tokenizer:
    """GPT-2's byte-level BPE; the merges come in order of rank."""
    merges = [merge.partition(" ")[::2] for merge in keys.strings("merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.whole))
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentence_piece(keys: "_Keys", tokens: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: the best scored token is merged first; characters outside the vocabulary become bytes.

    Each way to cut a token into two tokens becomes a merge, ranked by the score of the whole.
    """
    scores = keys.numbers("scores", len(tokens), None)
    vocab = {token: i for i, token in enumerate(tokens)}
    mergeable = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    longest = max(mergeable, key=len, default="")
    if len(longest) > MERGED_MAX:  # the cuts below cost the square of it
        raise ConfigError(f"{keys.source}: a token has {len(longest)} characters; allowed: up to {MERGED_MAX}")
    merges = [
        (-scores[vocab[token]], vocab[token[:cut]], vocab[token[cut:]], token[:cut], token[cut:])
        for token in mergeable
        for cut in range(1, len(token))
        if token[:cut] in mergeable and token[cut:] in mergeable
    ]
    merges.sort()
    unknown = keys.token_id("unknown_token_id", tokens)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[merge[3:] for merge in merges],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    return backend


@dataclass(frozen=True)
class _Keys:
    """The `tokenizer.ggml.*` keys of one file, each read with its type checked."""

    metadata: Mapping[str, Any]
    source: str

    def _bad(self, key: str, value: object, allowed: str) -> ConfigError:
        return ConfigError(f"{self.source}: tokenizer.ggml.{key} is {value!r:.60}; allowed: {allowed}")

    def strings(self, key: str) -> list[str]:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise self._bad(key, value, "a list of strings")
        wrong = next((item for item in value if not isinstance(item, str)), None)
        if wrong is not None:
            raise self._bad(key, wrong, "strings alone in this list")
        return list(value)

    def numbers(self, key: str, count: int, default: list[int] | None) -> list[Any]:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        try:
            numbers = list(value) if value is not None else None
        except TypeError:
            numbers = None
        if numbers is None or len(numbers) != count or isinstance(value, str):
            raise self._bad(key, value, f"a list of {count} numbers, one per token")
        return numbers

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise self._bad(key, value, "true, false")
        return value

    def token_id(self, key: str, tokens: Sequence[str]) -> int | None:
        """A token's id, or None; one beyond the vocabulary is ignored with a warning, as a stop id may be wrong."""
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(tokens):
            log.warning(
                "%s: tokenizer.ggml.%s %r is ignored: ids are 0 to %d", self.source, key, value, len(tokens) - 1
            )
            return None
        return value

    def prefix(self, bos_id: int | None, *, default: bool) -> tuple[int, ...]:
        if not self.flag("add_bos_token", default and bos_id is not None):
            return ()
        if bos_id is None:
            raise self._bad("bos_token_id", self.metadata.get("tokenizer.ggml.bos_token_id"), "a token's id")
        return (bos_id,)

    def pre_tokenizer(self) -> _PreTokenizer:
        name = self.metadata.get("tokenizer.ggml.pre")
        if name is None:
            log.warning("%s names no pre-tokenizer (tokenizer.ggml.pre); using 'default'", self.source)
            name = "default"
        if not isinstance(name, str) or name not in _PRE_TOKENIZERS:
            raise self._bad("pre", name, ", ".join(sorted(_PRE_TOKENIZERS)))
        return _PRE_TOKENIZERS[name]

    def template(self) -> str | None:
        value = self.metadata.get("tokenizer.chat_template")
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{self.source}: tokenizer.chat_template is a {type(value).__name__}, not text")
        return value

    def build(self, make: Callable[[], tokenizers.Tokenizer]) -> tokenizers.Tokenizer:
        try:
            return make()
        except ConfigError:
            raise
        except Exception as error:  # the library raises bare Exception for every fault of vocabulary and merges
            raise ConfigError(f"{self.source}: tokenizer.ggml.tokens and merges do not fit: {error}") from error
