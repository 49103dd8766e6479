"""Text to token ids and back: `Tokenizer`, the streaming `Detokenizer`, and `StopText` for stop strings.

Owns when BOS goes in front, how messages become a prompt, and which text may be shown while tokens still arrive. Knows
no file format (`tokenizer_files` and `tokenizer_gguf` do), no model and no request.

Invariants: text that was given out is never taken back. The deltas of a `Detokenizer`, joined, are `decode` of the same
ids, byte for byte, whatever the ids. Each pushed token costs the same however long the text is. A `Tokenizer` never
changes and may be shared between threads; a `Detokenizer` and a `StopText` belong to one text each.
"""

import codecs
import json
import operator
import struct
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, SupportsIndex

import jinja2
import xxhash
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hetsplit.errors import ConfigError, RequestError
from hetsplit.tokenizer_files import Vocabulary, read_folder
from hetsplit.tokenizer_gguf import read_gguf_metadata
from hetsplit.weights.gguf import read_gguf

ROLES = ("system", "developer", "user", "assistant", "tool")
# A template is a program of the model's; these are what it can raise.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


def load_tokenizer(path: Path) -> "Tokenizer | None":
    """The tokenizer of a Hugging Face folder or a GGUF file; None when there is none in it.

    Raises ConfigError naming the file, and the field, that is missing, corrupt or not supported.
    """
    path = Path(path)
    if path.is_dir():
        vocabulary = read_folder(path)
        return Tokenizer(vocabulary) if vocabulary else None
    if path.suffix.lower() != ".gguf" or not path.is_file():
        raise ConfigError(f"no tokenizer in {path}: it is neither a folder nor a .gguf file that exists")
    return tokenizer_from_gguf(read_gguf(path).metadata, source=str(path))


def tokenizer_from_gguf(metadata: Mapping[str, Any], *, source: str = "GGUF") -> "Tokenizer | None":
    """The tokenizer in a GGUF file's metadata, or None; `source` names the file in errors."""
    vocabulary = read_gguf_metadata(metadata, source)
    return Tokenizer(vocabulary) if vocabulary else None


class Tokenizer:
    """One model's tokenizer.

    bos_id: the id of the token that opens a text, or None; `encode` puts it in front only where the model says so.
    eos_ids: every id that ends a text or a turn; the first is the one the files name.
    vocab_size: ids are 0 to vocab_size - 1.
    fingerprint: hex hash over (id, bytes) of the real tokens, the ids put before a text, and the stop ids; the same
        whichever file format the vocabulary came from.
    template_fingerprint: hex hash of the chat template's text, None without one.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        self.vocab_size = len(vocabulary.pieces)
        self.fingerprint = _fingerprint(vocabulary)
        template = vocabulary.template
        self.template_fingerprint = None if template is None else xxhash.xxh3_128_hexdigest(template.encode())

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with BOS in front where the model's files ask for it, never twice, and no EOS at the end.

        Special tokens written in the text become those tokens, as in transformers. Raises RequestError for what is no
        text or holds half a surrogate pair.
        """
        ids = self._ids(text)
        prefix = list(self._vocabulary.prefix)
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation in the model's chat template, ready for the assistant's answer.

        A message has `role` (system, developer, user, assistant, tool) and `content` (text); other fields go to the
        template as they are. The template alone says whether BOS comes first. Special tokens written in a message
        become those tokens, so a caller who does not trust the text must filter it. Raises RequestError naming the bad
        message and field, for a model without a template, and for what the template refuses.
        """
        return self._ids(self.render_chat(messages))

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text that `encode_chat` encodes."""
        _check_messages(messages)
        given = {"messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._template.render(self._vocabulary.names, **given)
        except _TEMPLATE_FAULTS as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error

    def decode(self, ids: Sequence[int], *, whole: bool = False) -> str:
        """Text of the ids; special tokens give none, bytes that are not UTF-8 give U+FFFD.

        `whole`: the ids are a text from its beginning, as `encode` gives them, so the space that a SentencePiece
        tokenizer puts before a text is taken off. Without it they continue a prompt and a first space is kept.
        Raises RequestError for an id outside the vocabulary.
        """
        data = b"".join([_text_of(self._vocabulary, i) for i in ids])
        if whole and self._vocabulary.strip_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def detokenizer(self, *, whole: bool = False) -> "Detokenizer":
        """A fresh stream of text; `whole` as in `decode`."""
        return Detokenizer(self._vocabulary, strip_space=whole and self._vocabulary.strip_space)

    def _ids(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise RequestError(f"text is a {type(text).__name__}; allowed: a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"text holds half a surrogate pair at character {error.start}") from error
        return list(self._vocabulary.backend.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _template(self) -> jinja2.Template:
        if self._vocabulary.template is None:
            raise RequestError("the model has no chat template; give a prompt as text or token ids")
        try:
            return _chat_environment().from_string(self._vocabulary.template)
        except _TEMPLATE_FAULTS as error:
            raise RequestError(f"the model's chat template is malformed: {error}") from error


def _text_of(vocabulary: Vocabulary, token: SupportsIndex) -> bytes:
    """What an id adds to a text: nothing for special tokens and for ids without a token."""
    try:
        i = operator.index(token)
    except TypeError:
        i = -1
    if not 0 <= i < len(vocabulary.pieces):
        last = len(vocabulary.pieces) - 1
        raise RequestError(f"token id {token!r} is outside the vocabulary; allowed: 0 to {last}")
    return b"" if i in vocabulary.special else vocabulary.pieces[i] or b""


def _fingerprint(vocabulary: Vocabulary) -> str:
    state = xxhash.xxh3_128()
    for i, piece in enumerate(vocabulary.pieces):
        if piece is not None:
            state.update(struct.pack("<II", i, len(piece)) + piece)
    for ids in (vocabulary.prefix, sorted(vocabulary.eos_ids)):
        state.update(struct.pack(f"<I{len(ids)}I", len(ids), *ids))
    return state.hexdigest()


# --- chat template ---------------------------------------------------------------------------------------------------


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages is {messages!r:.60}; allowed: a list of at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{i}] is a {type(message).__name__}; allowed: an object with role and content")
        if message.get("role") not in ROLES:
            raise RequestError(f"messages[{i}].role is {message.get('role')!r:.60}; allowed: {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise RequestError(f"messages[{i}].content is {message.get('content')!r:.60}; allowed: a string")


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only passes its body through."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _chat_environment() -> ImmutableSandboxedEnvironment:
    """The environment that transformers documents for chat templates; sandboxed, for a template comes with a model."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


# --- streams ---------------------------------------------------------------------------------------------------------


class Detokenizer:
    """Token ids to text as they come, never half a character; made by `Tokenizer.detokenizer`.

    Bytes of tokens are collected and complete UTF-8 is given out at once. U+FFFD stands for bytes only when the next
    byte, or `flush`, proves that they are no character.
    """

    def __init__(self, vocabulary: Vocabulary, *, strip_space: bool = False) -> None:
        self._vocabulary = vocabulary
        self._strip_space = strip_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that this token completes, maybe none. Raises RequestError for an id outside the vocabulary."""
        data = _text_of(self._vocabulary, token)
        if self._strip_space and data:
            self._strip_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left at the end: nothing, or U+FFFD for a character that was cut off."""
        return self._decoder.decode(b"", final=True)


class StopText:
    """Cuts a stream of text before the first stop string, wherever the pieces of text are cut.

    The stop string that is complete first wins; of several complete at the same character, the longest. `push` holds
    back the longest tail that may still become one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise RequestError(f"stop is {stops!r:.60}; allowed: a list of strings, none of them empty")
        self._stops = tuple(stops)
        self._held = ""
        self._hit = False

    def push(self, text: str) -> tuple[str, bool]:
        """Text that may be shown, and whether a stop string was met; after that nothing more is shown."""
        if self._hit:
            return "", True
        text = self._held + text
        if (start := self._first_stop(text)) is not None:
            self._hit, self._held = True, ""
            return text[:start], True
        shown = len(text) - self._open_tail(text)
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """The text held back, at the end of a stream that met no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str) -> int | None:
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _open_tail(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        sizes = range(min(longest, len(text)), 0, -1)
        return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in self._stops)), 0)
