"""Tokenizer: ids equal transformers', text is never half a character, stop strings across token borders (O16, O17)."""

import json
import random
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from hetsplit.errors import ConfigError, RequestError
from hetsplit.tokenizer import StopText, Tokenizer, load_tokenizer, tokenizer_from_gguf
from hetsplit.tokenizer_gguf import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from hetsplit.weights.gguf import read_gguf

# Recorded from transformers. `digits` holds texts where its GGUF loader differs from the model: it overlooks that the
# pre-tokenizer `smollm` splits digits, so those ids come from the same tokenizer with the model's own splitting put in.
GOLDEN = json.loads((Path(__file__).parent / "smollm2_tokens.json").read_text(encoding="utf-8"))
EMOJI, WORLD, THUMB = [10813, 242, 218], [7906, 240, 178, 239, 230], [10813, 235, 231, 10813, 233, 138]


@pytest.fixture(scope="module")
def smol_metadata(smollm2_path: Path) -> dict:
    return read_gguf(smollm2_path).metadata


@pytest.fixture(scope="module")
def smol(smollm2_path: Path) -> Tokenizer:
    tokenizer = load_tokenizer(smollm2_path)
    assert tokenizer is not None
    return tokenizer


# --- SmolLM2 against transformers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "ids"), GOLDEN["encode"] + GOLDEN["digits"])
def test_smol_ids_are_those_of_transformers(smol: Tokenizer, text: str, ids: list[int]) -> None:
    assert smol.encode(text) == ids


@pytest.mark.parametrize(("ids", "text"), GOLDEN["decode"])
def test_smol_text_is_that_of_transformers(smol: Tokenizer, ids: list[int], text: str) -> None:
    assert smol.decode(ids) == text


@pytest.mark.parametrize(("messages", "ids"), GOLDEN["chat"])
def test_smol_chat_ids_are_those_of_transformers(smol: Tokenizer, messages: list, ids: list[int]) -> None:
    assert smol.encode_chat(messages) == ids


def test_smol_facts(smol: Tokenizer) -> None:
    assert (smol.bos_id, smol.eos_ids, smol.vocab_size) == (1, (2, 0), 49152)
    assert smol.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert len(smol.encode_chat([{"role": "user", "content": "What is the capital of France?"}])) == 37
    assert len(smol.encode_chat([{"role": "user", "content": "Reply with only this emoji: 😀"}])) == 40


def test_smol_chat_does_not_double_the_chat_opener(smol: Tokenizer) -> None:
    ids = smol.encode_chat([{"role": "user", "content": "hi"}])
    assert ids[0] == 1 and ids[1] != 1
    assert smol.encode(smol.render_chat([{"role": "user", "content": "hi"}])) == ids


# --- O16: one character, several tokens ------------------------------------------------------------------------------


def stream(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(**options)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize(("text", "ids"), [("😀", EMOJI), ("世界", WORLD), ("👍🏽", THUMB)])
def test_one_character_of_several_tokens_comes_once_and_whole(smol: Tokenizer, text: str, ids: list[int]) -> None:
    assert smol.encode(text) == ids
    around = [*smol.encode("A "), *ids, *smol.encode("ab")]
    deltas = stream(smol, around)
    assert "".join(deltas) == f"A {text}ab" == smol.decode(around)
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(stream(smol, ids)) == text


def test_deltas_come_with_the_token_that_completes_the_character(smol: Tokenizer) -> None:
    assert stream(smol, EMOJI) == ["", "", "😀", ""]
    assert stream(smol, THUMB) == ["", "", "👍", "", "", "\U0001f3fd", ""]
    assert len(smol.encode("👩\u200d💻")) == 8
    assert "".join(stream(smol, smol.encode("👩\u200d💻"))) == "👩\u200d💻"


def test_star_emoji_streams_as_the_case_says(smol: Tokenizer) -> None:
    star = [10813, 230, 249]
    assert "".join(stream(smol, star)) == "🌟"
    assert "".join(stream(smol, star * 2)) == "🌟🌟"
    cut = stream(smol, [*star, 10813])
    assert cut == ["", "", "🌟", "", "\ufffd"] and "".join(cut) == smol.decode([*star, 10813])


def test_invalid_bytes_are_replaced_only_when_the_next_byte_proves_it(smol: Tokenizer) -> None:
    detokenizer = smol.detokenizer()
    assert detokenizer.push(EMOJI[0]) == ""
    assert detokenizer.push(smol.encode("a")[0]) == "\ufffda"
    assert detokenizer.flush() == ""


def test_special_tokens_give_no_text_and_do_not_break_a_character(smol: Tokenizer) -> None:
    assert stream(smol, [1, EMOJI[0], 0, EMOJI[1], 2, EMOJI[2]]) == ["", "", "", "", "", "😀", ""]


@pytest.mark.parametrize("seed", range(20))
def test_joined_deltas_are_the_decoded_text(smol: Tokenizer, seed: int) -> None:
    rnd = random.Random(seed)
    pools = [range(smol.vocab_size), [*EMOJI, *WORLD, *THUMB, 0, 504]]
    ids = [rnd.choice(pools[seed % 2]) for _ in range(500)]
    whole = smol.decode(ids)
    deltas = stream(smol, ids)
    assert "".join(deltas) == whole
    shown = ""
    for n, delta in enumerate(deltas[:-1], 1):
        shown += delta
        tail = smol.decode(ids[:n])[len(shown) :]
        assert whole.startswith(shown) and set(tail) <= {"\ufffd"}  # all text that is certain is shown


def test_every_token_alone_streams_as_it_decodes(smol: Tokenizer) -> None:
    assert all("".join(stream(smol, [i])) == smol.decode([i]) for i in range(smol.vocab_size))


def test_push_keeps_no_history(smol: Tokenizer) -> None:
    detokenizer = smol.detokenizer()
    tracemalloc.start()
    for _ in range(20_000):
        detokenizer.push(504)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 20_000


@pytest.mark.parametrize("bad", [-1, 49152, 10**30, "5", None, 1.0])
def test_id_outside_the_vocabulary_is_refused(smol: Tokenizer, bad: object) -> None:
    for use in (lambda: smol.decode([bad]), lambda: smol.detokenizer().push(bad)):  # type: ignore[list-item, arg-type]
        with pytest.raises(RequestError, match="0 to 49151"):
            use()


# --- tiny tokenizers, one vocabulary in both formats -----------------------------------------------------------------

CORPUS = ["hello world, hello there", "the cat sat on the mat 123", "naïve café 世界 😀", "  spaced   out\n\nlines"] * 3
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_end|>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"


def trained() -> Backend:
    """A byte-level BPE with special tokens at 0 to 3."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def write_folder(folder: Path, backend: Backend, **config: object) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def gguf_of(backend: Backend, **more: object) -> dict:
    """The metadata a converter writes for the same vocabulary, padded with two unused tokens."""
    document = json.loads(backend.to_str())
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    merges = [" ".join(merge) for merge in document["model"]["merges"]]
    types = [CONTROL if token in SPECIALS else NORMAL for token in tokens]
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*tokens, "[PAD0]", "[PAD1]"],
        "merges": merges,
        "token_type": [*types, UNUSED, UNUSED],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | more).items() if value is not None}


def loaded(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def from_gguf(metadata: dict) -> Tokenizer:
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer is not None
    return tokenizer


def test_one_vocabulary_in_both_formats_is_one_tokenizer(tmp_path: Path) -> None:
    backend = trained()
    folder, gguf = loaded(write_folder(tmp_path, backend)), from_gguf(gguf_of(backend))
    assert folder.fingerprint == gguf.fingerprint
    assert folder.eos_ids == gguf.eos_ids == (2, 3)
    assert folder.bos_id == gguf.bos_id == 1
    for text in [*CORPUS, "it's\n\n 42  7", "a</s>b", ""]:
        assert folder.encode(text) == gguf.encode(text)
        assert folder.decode(folder.encode(text)) == text.replace("</s>", "")


def test_exported_smol_folder_is_the_same_tokenizer(smol: Tokenizer, smol_metadata: dict, tmp_path: Path) -> None:
    backend = smol._vocabulary.backend
    restored = Backend.from_str(backend.to_str())
    restored.decoder = decoders.ByteLevel()
    restored.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(smol_metadata["tokenizer.chat_template"])
    folder = loaded(tmp_path)
    assert (folder.fingerprint, folder.template_fingerprint) == (smol.fingerprint, smol.template_fingerprint)
    assert folder.eos_ids == smol.eos_ids
    messages, ids = GOLDEN["chat"][2]
    assert folder.encode_chat(messages) == ids


def test_fingerprint_sees_tokens_ids_and_stop_ids(tmp_path: Path) -> None:
    metadata = gguf_of(trained())
    tokens = list(metadata["tokenizer.ggml.tokens"])
    fingerprint = from_gguf(metadata).fingerprint
    assert from_gguf(metadata | {"tokenizer.ggml.eos_token_id": 0}).fingerprint != fingerprint
    assert from_gguf(metadata | {"tokenizer.ggml.add_bos_token": True}).fingerprint != fingerprint
    renamed = [*tokens[:3], "<|other|>", *tokens[4:]]
    assert from_gguf(metadata | {"tokenizer.ggml.tokens": renamed}).fingerprint != fingerprint
    types = [CONTROL] * 4 + [NORMAL] * (len(tokens) - 6)
    unpadded = {"tokenizer.ggml.tokens": tokens[:-2], "tokenizer.ggml.token_type": types}
    assert from_gguf(metadata | unpadded).fingerprint == fingerprint
    assert from_gguf(metadata).template_fingerprint is None


def test_truncation_and_padding_settings_of_the_file_do_not_apply(tmp_path: Path) -> None:
    backend = trained()
    plain = loaded(write_folder(tmp_path, backend)).encode(CORPUS[0])
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert loaded(write_folder(tmp_path, backend)).encode(CORPUS[0]) == plain and len(plain) > 4


# --- BOS -------------------------------------------------------------------------------------------------------------


def with_post_processor(backend: Backend, template: str) -> Backend:
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
    return backend


@pytest.mark.parametrize(
    ("template", "config", "opens"),
    [
        (None, {}, False),
        (None, {"add_bos_token": True}, True),
        ("<s> $A", {}, True),
        ("<s> $A </s>", {}, True),
        ("<s> $A", {"add_bos_token": False}, False),
        ("<s> $A", {"add_bos_token": None}, True),
        ("$A", {"add_bos_token": True}, True),
    ],
)
def test_bos_comes_once_where_the_folder_says_so(
    tmp_path: Path, template: str | None, config: dict, opens: bool
) -> None:
    backend = trained() if template is None else with_post_processor(trained(), template)
    tokenizer = loaded(write_folder(tmp_path, backend, **config))
    assert tokenizer.encode("hello") == [1] * opens + tokenizer.encode("<s>hello")[1:]
    assert tokenizer.encode("<s>hello").count(1) == 1
    assert tokenizer.encode("") == [1] * opens
    assert tokenizer.encode_chat([{"role": "user", "content": "hello"}]).count(1) == 1
    assert 2 not in tokenizer.encode("hello")


def test_bos_that_the_template_leaves_out_is_not_added(tmp_path: Path) -> None:
    tokenizer = loaded(write_folder(tmp_path, trained(), add_bos_token=True, chat_template="{{ messages[0].content }}"))
    assert 1 not in tokenizer.encode_chat([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("more", "opens"),
    [
        ({}, False),
        ({"add_bos_token": True}, True),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "tekken"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
    ],
)
def test_bos_comes_once_where_the_gguf_says_so(more: dict, opens: bool) -> None:
    tokenizer = from_gguf(gguf_of(trained(), **more))
    assert (tokenizer.encode("hello")[0] == 1) is opens
    assert tokenizer.encode("<s>hello").count(1) == 1


# --- O17: stop ids ---------------------------------------------------------------------------------------------------


def test_stop_ids_are_the_union_of_what_the_gguf_names() -> None:
    backend = trained()
    hello = backend.encode("hello").ids[0]
    assert from_gguf(gguf_of(backend, eot_token_id=hello, eom_token_id=0)).eos_ids == (2, hello, 0, 3)
    assert from_gguf(gguf_of(backend, eos_token_id=None)).eos_ids == (3, 2)


def test_end_token_counts_only_where_it_is_special() -> None:
    metadata = gguf_of(trained())
    metadata["tokenizer.ggml.token_type"][3] = USER_DEFINED
    gguf = from_gguf(metadata)
    assert gguf.eos_ids == (2,)
    assert gguf.decode([3]) == "<|im_end|>"


def test_stop_id_beyond_the_vocabulary_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = from_gguf(gguf_of(trained(), eos_token_id=99999))
    assert tokenizer.eos_ids == (3, 2)
    assert "99999" in caplog.text and f"0 to {tokenizer.vocab_size - 1}" in caplog.text


def test_stop_token_that_the_folder_lacks_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert loaded(write_folder(tmp_path, trained(), eos_token="<gone>")).eos_ids == (3, 2)
    assert "<gone>" in caplog.text


def test_special_tokens_map_fills_what_the_config_leaves_out(tmp_path: Path) -> None:
    write_folder(tmp_path, trained())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>"}')
    tokenizer = loaded(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (3, 2))


# --- pre-tokenizers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", "12", " 345", " ", " 6", " cAMel", "\n", "\n", "end", "!?", "\n"]),
        ("smollm", ["It", "'s", "1", "2", " ", "3", "4", "5", "  ", "6", " cAMel", "\n", "\n", "end", "!?", "\n"]),
        ("llama-bpe", ["It", "'s", "12", " ", "345", " ", " ", "6", " cAMel", "\n\n", "end", "!?\n"]),
        ("qwen2", ["It", "'s", "1", "2", " ", "3", "4", "5", " ", " ", "6", " cAMel", "\n\n", "end", "!?\n"]),
        ("tekken", ["It", "'s", "1", "2", " ", "3", "4", "5", " ", " ", "6", " c", "AMel", "\n\n", "end", "!?\n"]),
        ("default", ["It", "'", "s", "12", " ", "345", " ", " ", "6", " cAMel", "\n", "\n", "end", "!?", "\n"]),
    ],
)
def test_named_pre_tokenizer_splits(pre: str, pieces: list[str]) -> None:
    backend = from_gguf(gguf_of(trained(), pre=pre))._vocabulary.backend
    text = "It's12 345  6 cAMel\n\nend!?\n"
    splits = backend.pre_tokenizer.pre_tokenize_str(text)
    got = [text[start:stop] for _, (start, stop) in splits]
    assert "".join(got) == text
    assert got == pieces


def test_unknown_pre_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'dbrx'.*smollm"):
        tokenizer_from_gguf(gguf_of(trained(), pre="dbrx"))


def test_whole_token_needs_no_merge() -> None:
    backend = trained()
    metadata = gguf_of(backend, pre="llama-bpe", add_bos_token=False)
    metadata["tokenizer.ggml.tokens"][-1] = "zzqq"
    metadata["tokenizer.ggml.token_type"][-1] = NORMAL
    assert len(backend.encode("zzqq").ids) > 1
    assert from_gguf(metadata).encode("zzqq") == [backend.get_vocab_size() + 1]


# --- SentencePiece ---------------------------------------------------------------------------------------------------


def sentence_piece(**more: object) -> dict:
    """A vocabulary of letters and words over 'abc', byte tokens, and a user-defined token."""
    rnd = random.Random(7)
    words = ["▁", "a", "b", "c", *sorted({"".join(rnd.choices("▁abc", k=rnd.randint(2, 4))) for _ in range(40)})]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "[TOOL]"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words), USER_DEFINED]
    scores = [0.0] * 259 + [-float(i) for i in rnd.sample(range(len(words)), len(words))] + [0.0]
    keys = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | more).items() if value is not None}


def merge_by_score(text: str, metadata: dict) -> list[int]:
    """SentencePiece's algorithm, slowly: the neighbours whose union scores best are joined, the leftmost first."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(tokens)}
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [i for part in parts for i in ([ids[part]] if part in ids else [3 + byte for byte in part.encode()])]


@pytest.mark.parametrize("seed", range(30))
def test_sentence_piece_merges_by_score_with_byte_fallback(seed: int) -> None:
    metadata = sentence_piece()
    tokenizer = from_gguf(metadata)
    rnd = random.Random(seed)
    text = "".join(rnd.choices("abc aé世😀\n", weights=[5, 5, 5, 5, 5, 1, 1, 1, 1], k=rnd.randint(1, 60)))
    ids = tokenizer.encode(text)
    assert ids == [1, *merge_by_score(" " + text, metadata)]
    assert tokenizer.decode(ids, whole=True) == text
    assert tokenizer.decode(ids) == " " + text
    for whole in (True, False):
        assert "".join(stream(tokenizer, ids, whole=whole)) == tokenizer.decode(ids, whole=whole)


def test_first_space_is_taken_off_once_and_kept_after_a_prompt() -> None:
    tokenizer = from_gguf(sentence_piece())
    space, a = (tokenizer._vocabulary.backend.token_to_id(token) for token in "▁a")
    assert stream(tokenizer, [1, space, space, a], whole=True) == ["", "", " ", "a", ""]
    assert stream(tokenizer, [space, a]) == [" ", "a", ""]
    unspaced = from_gguf(sentence_piece(add_space_prefix=False))
    assert unspaced.decode([space, a], whole=True) == " a"
    assert unspaced.encode(" a")[0] == 1 and unspaced.decode(unspaced.encode(" a"), whole=True) == " a"


def test_user_defined_token_is_matched_and_shown() -> None:
    tokenizer = from_gguf(sentence_piece())
    ids = tokenizer.encode("a[TOOL]")
    assert ids[-1] == tokenizer.vocab_size - 1
    assert tokenizer.decode(ids, whole=True) == "a[TOOL]"


def sentence_piece_folder(folder: Path, metadata: dict) -> Path:
    """The tokenizer.json that converters write for such a vocabulary."""
    tokenizer = from_gguf(metadata)
    backend = Backend.from_str(tokenizer._vocabulary.backend.to_str())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken("<unk>", special=True, normalized=False)])
    return write_folder(folder, with_post_processor(backend, "<s> $A"))


def test_sentence_piece_in_both_formats_is_one_tokenizer(tmp_path: Path) -> None:
    metadata = sentence_piece()
    gguf, folder = from_gguf(metadata), loaded(sentence_piece_folder(tmp_path, metadata))
    assert folder.fingerprint == gguf.fingerprint
    for text in ["abc cab", "", " a", "世a[TOOL]b</s>c"]:
        ids = gguf.encode(text)
        assert folder.encode(text) == ids
        assert folder.decode(ids, whole=True) == gguf.decode(ids, whole=True)
        shown = folder._vocabulary.backend.decode(ids, skip_special_tokens=True)
        assert folder.decode(ids, whole=True) == shown


# --- chat ------------------------------------------------------------------------------------------------------------

USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        ([*USER, "hi"], r"messages\[1\]"),
        ([{"content": "hi"}], r"messages\[0\]\.role is None"),
        ([*USER, {"role": "wizard", "content": "hi"}], r"messages\[1\]\.role is 'wizard'; allowed: system"),
        ([{"role": "user"}], r"messages\[0\]\.content is None"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content is 5"),
    ],
)
def test_bad_message_is_refused_by_index_and_field(smol: Tokenizer, messages: list, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        smol.encode_chat(messages)


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "malformed"),
        ("{{ messages[7].content.upper() }}", "refuses"),
        ("{{ messages[0].content + 1 }}", "refuses"),
        ("{{ 1 // 0 }}", "refuses"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ 'abc'|nothing }}", "nothing"),
    ],
)
def test_template_error_is_a_request_error(tmp_path: Path, template: str, named: str) -> None:
    tokenizer = loaded(write_folder(tmp_path, trained(), chat_template=template))
    with pytest.raises(RequestError, match=named):
        tokenizer.encode_chat(USER)
    assert tokenizer.encode("hello")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% if true %}\n  x\n{% endif %}\ny", "  x\ny"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ add_generation_prompt }}", "<s>|</s>||True"),
    ],
)
def test_template_environment_is_that_of_transformers(tmp_path: Path, template: str, text: str) -> None:
    tokenizer = loaded(write_folder(tmp_path, trained(), chat_template=template))
    assert tokenizer.render_chat(USER) == text


def test_template_is_found_in_each_place(tmp_path: Path) -> None:
    several = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write_folder(tmp_path, trained(), chat_template=several)
    from_list = loaded(tmp_path)
    assert from_list.render_chat(USER) == "plain"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    from_file = loaded(tmp_path)
    assert from_file.render_chat(USER) == "from the file"
    assert from_file.template_fingerprint not in (None, from_list.template_fingerprint)


def test_model_without_a_template_says_so() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        from_gguf(gguf_of(trained())).encode_chat(USER)


@pytest.mark.parametrize("text", [None, 5, b"bytes", "half \ud83d"])
def test_what_is_no_text_is_refused(smol: Tokenizer, text: object) -> None:
    with pytest.raises(RequestError, match="text"):
        smol.encode(text)  # type: ignore[arg-type]


# --- files -----------------------------------------------------------------------------------------------------------


def test_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None


def test_gguf_without_a_tokenizer_has_none() -> None:
    assert tokenizer_from_gguf({"general.architecture": "llama"}) is None


@pytest.mark.parametrize("missing", ["nothing-here", "model.gguf", "model.bin"])
def test_path_that_holds_nothing_is_refused(tmp_path: Path, missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        load_tokenizer(tmp_path / missing)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", ""),
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[1]"),
        ("tokenizer.json", '{"model": {"type": "BPE"}}'),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"bos_token": 5}'),
        ("tokenizer_config.json", '{"chat_template": 5}'),
        ("special_tokens_map.json", "nonsense"),
    ],
)
def test_corrupt_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    write_folder(tmp_path, trained())
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        load_tokenizer(tmp_path)


def test_binary_file_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, trained())
    for name in ("chat_template.jinja", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match=name):
            load_tokenizer(tmp_path)


def test_missing_tokenizer_json_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, trained())
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)


def test_folder_that_adds_a_bos_it_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="add_bos_token"):
        load_tokenizer(write_folder(tmp_path, trained(), bos_token="<gone>", add_bos_token=True))


def test_unsupported_decoder_is_refused_by_name(tmp_path: Path) -> None:
    backend = trained()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        load_tokenizer(write_folder(tmp_path, backend))


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"model": "bert"}, "'bert'.*'gpt2', 'llama'"),
        ({"tokens": None}, "tokens"),
        ({"tokens": "abc"}, "tokens"),
        ({"tokens": ["a", 5]}, "tokens is 5"),
        ({"merges": None}, "merges"),
        ({"merges": ["nospace"]}, "merges"),
        ({"merges": ["q zz"]}, "merges"),
        ({"token_type": [1]}, r"a list of \d+ numbers"),
        ({"token_type": 5}, "token_type"),
        ({"add_bos_token": "yes"}, "add_bos_token"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id"),
        ({"add_bos_token": True, "bos_token_id": 9999}, "bos_token_id is 9999"),
        ({"model": "llama"}, "scores"),
        ({"pre": 5}, "pre is 5"),
    ],
)
def test_bad_gguf_key_is_named(more: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        tokenizer_from_gguf(gguf_of(trained(), **more))


def test_ids_and_tokens_of_absurd_size_are_refused(tmp_path: Path) -> None:
    file = write_folder(tmp_path, trained()) / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    document["model"]["vocab"]["!"] = 2**31
    file.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ConfigError, match="2147483648"):
        load_tokenizer(tmp_path)
    metadata = sentence_piece()
    metadata["tokenizer.ggml.tokens"][-2] = "a" * 1_000_000
    with pytest.raises(ConfigError, match="1000000 characters"):
        tokenizer_from_gguf(metadata)


# --- stop strings ----------------------------------------------------------------------------------------------------


def naive_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text letter by letter until it ends in a stop string."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))], True
    return text, False


def run_stop(pieces: list[str], stops: list[str]) -> tuple[str, bool, list[str]]:
    stop_text, shown, hit = StopText(stops), [], False
    for piece in pieces:
        safe, hit = stop_text.push(piece)
        shown.append(safe)
        if hit:
            break
    return "".join(shown) + stop_text.flush(), hit, shown


@pytest.mark.parametrize("seed", range(300))
def test_stop_strings_do_not_depend_on_where_the_text_is_cut(seed: int) -> None:
    rnd = random.Random(seed)
    stops = ["".join(rnd.choices("ab", k=rnd.randint(1, 6))) + rnd.choice(["", "c"]) for _ in range(rnd.randint(1, 4))]
    text = "".join(rnd.choices("abc", weights=[5, 5, 1], k=rnd.randint(0, 40)))
    cuts = sorted(rnd.choices(range(len(text) + 1), k=rnd.randint(0, 20)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    expected = naive_stop(text, stops)
    for way in (pieces, list(text), [text]):
        got, hit, _ = run_stop(way, stops)
        assert (got, hit) == expected


@pytest.mark.parametrize("seed", range(50))
def test_just_the_tail_that_may_begin_a_stop_is_withheld(seed: int) -> None:
    rnd = random.Random(seed)
    stops = ["aab", "abab", "bbba"]
    stop_text, seen, shown = StopText(stops), "", ""
    while True:
        letter = rnd.choice("ab")
        seen += letter
        safe, hit = stop_text.push(letter)
        shown += safe
        if hit or len(seen) > 200:
            break
        tails = [n for n in range(5) for stop in stops if n < len(stop) and seen.endswith(stop[:n])]
        assert shown == seen[: len(seen) - max(tails)]


def test_text_before_a_stop_is_shown_and_nothing_after() -> None:
    stop_text = StopText(["</end>"])
    assert stop_text.push("one </") == ("one ", False)
    assert stop_text.push("b> two </en") == ("</b> two ", False)
    assert stop_text.push("d> three") == ("", True)
    assert stop_text.push("four") == ("", True)
    assert stop_text.flush() == ""


def test_text_held_back_comes_at_the_end() -> None:
    stop_text = StopText(["\n\n"])
    assert stop_text.push("line\n") == ("line", False)
    assert stop_text.flush() == "\n"


def test_no_stop_strings_hold_nothing_back() -> None:
    assert StopText([]).push("text") == ("text", False)


@pytest.mark.parametrize("stops", ["abc", [""], ["a", ""], [5]])
def test_bad_stop_strings_are_refused(stops: list) -> None:
    with pytest.raises(RequestError, match="stop"):
        StopText(stops)


def test_stop_string_inside_a_stream_of_split_characters(smol: Tokenizer) -> None:
    detokenizer, stop_text, shown = smol.detokenizer(), StopText(["世界"]), ""
    for i in smol.encode("A 😀 世世界 b"):
        safe, hit = stop_text.push(detokenizer.push(i))
        shown += safe
        if hit:
            break
    assert hit and shown == "A 😀 世"
