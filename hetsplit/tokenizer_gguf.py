"""The tokenizer in GGUF metadata, read as a `Vocabulary`.

Owns the `tokenizer.ggml.*` keys and the pre-tokenizers that GGUF names by a word. Knows no file: it is handed the
metadata. Invariant: every key is read with its type checked.

Sources: the GGUF specification's `tokenizer.ggml.*` keys, where a pre-tokenizer's name stands for the regular
expressions that llama.cpp runs under it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from hetsplit.errors import ConfigError
from hetsplit.tokenizer_files import NAMED, SPACE, Pieces, Spelling, Vocabulary, end_ids

log = logging.getLogger(__name__)

MERGED_MAX = 256
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
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    special = frozenset(i for i, kind in enumerate(types) if kind in (CONTROL, UNKNOWN))
    named = {key: i for key in NAMED if (i := keys.token_id(f"{_LONG_NAMES.get(key, key)}_id", tokens)) is not None}
    ends = [named.get("eos_token"), *(keys.token_id(f"{key}_token_id", tokens) for key in ("eot", "eom"))]
    eos_ids = end_ids([i for i in ends if i is not None], {token: i for i, token in enumerate(tokens)}, special)
    special |= {i for i in (named.get("bos_token"), *eos_ids) if i is not None}
    matched = [i for i, kind in enumerate(types) if i in special or kind == USER_DEFINED]
    backend.add_tokens([AddedToken(tokens[i], special=i in special, normalized=False) for i in matched if tokens[i]])
    return Vocabulary(
        backend=backend,
        pieces=_gguf_pieces(tokens, types, special, Spelling(pre is not None)),
        special=special,
        prefix=keys.prefix(named.get("bos_token"), default=pre is None or pre.add_bos),
        bos_id=named.get("bos_token"),
        eos_ids=eos_ids,
        strip_space=adds_space,
        template=keys.template(),
        names={key: tokens[i] for key, i in named.items()},
    )


_LONG_NAMES = {"unk_token": "unknown_token", "pad_token": "padding_token"}


def _gguf_pieces(tokens: Sequence[str], types: Sequence[int], special: frozenset[int], spelling: Spelling) -> Pieces:
    bytes_too = Spelling(spelling.byte_level, byte_tokens=True)

    def piece(i: int, token: str, kind: int) -> bytes | None:
        if i in special:
            return token.encode()
        if kind in (USER_DEFINED, UNUSED):
            return spelling.added(token) if kind == USER_DEFINED else None
        return (bytes_too if kind == BYTE else spelling).piece(token)

    return Pieces(piece(i, token, kind) for i, (token, kind) in enumerate(zip(tokens, types, strict=True)))


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
    backend.normalizer = normalizers.Replace(" ", SPACE)
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
