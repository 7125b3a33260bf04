# SPDX-License-Identifier: Apache-2.0
"""Texts held to grammars: whatever the model says, what comes out is what was asked for."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time

import numpy as np
import pytest

import slimrt
from conftest import PROMPT, TESTS, third_party
from seq2seq_vocabularies import opened
from slimrt import core
from slimrt.errors import GrammarError
from slimrt.generation.gbnf import lark_of
from slimrt.generation.grammar import MAX_TEXT, Grammar, Matcher, compile_grammar, source_of, vocabulary_of
from slimrt.generation.masks import MASKS
from slimrt.generation.schemas import enforceable
from slimrt.modelfile.hf.vocabulary import vocabulary_fields
from slimrt.tokenizer.tokenizer import Tokenizer
from test_tokenizer_pieces import marian_directory

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

pytestmark = pytest.mark.unsanitized  # Python, and another library's Rust
MODELS = TESTS.parent / "models"

FORMATS = ("date", "email", "ipv4", "uuid")  # the checker refuses times that RFC 3339 has: a small z, a leap second
WORD = {"type": "string", "maxLength": 6}
SMALL = {"type": "integer", "minimum": -20, "maximum": 300}
POINT = {"type": "object", "properties": {"x": SMALL, "y": SMALL}, "required": ["x", "y"]}


def closed(required=None, /, **properties):
    """An object of these properties alone, all of them required unless told otherwise."""
    required = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def listed(items, least=0, most=3):
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


SCHEMAS = [
    {"type": "null"}, {"type": "boolean"}, SMALL, WORD, {"type": ["null", "boolean"]}, {"const": "one"}, {"const": 3.5},
    {"const": {"a": [1, None]}}, {"enum": ["red", "green", 7, None, True]},
    {"enum": ["a \"quoted\" word", "back\\slash"]},
    {"type": "integer", "minimum": 0}, {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 12},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 500}, {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -1.5, "maximum": 2.25}, {"type": "string", "minLength": 2, "maxLength": 2},
    {"type": "string", "pattern": "^[a-c]{2,4}$"}, {"type": "string", "pattern": "^(\\d{3}-)?\\d{4}$"},
    {"type": "string", "pattern": "^x", "maxLength": 4}, {"type": "string", "format": "date"},
    {"type": "string", "format": "time"}, {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"}, {"type": "string", "format": "email", "maxLength": 20},
    listed(SMALL), listed(WORD, 2, 4), listed({"type": "boolean"}, 3, 3), listed(listed({"type": "null"})),
    {"type": "array", "prefixItems": [WORD, SMALL], "items": False, "minItems": 2},
    {"type": "array", "items": [WORD, SMALL], "additionalItems": False, "minItems": 2},  # a tuple before 2020-12
    closed(prefixItems=SMALL, additionalItems={"const": {"prefixItems": [], "additionalItems": 1}}),
    {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    POINT, closed(a=SMALL), closed(a=WORD, b=WORD), closed([], a=SMALL, b=WORD),
    closed(["b"], a=SMALL, b={"type": "null"}),
    closed(name=WORD, tags=listed(WORD), on={"type": "boolean"}), closed(p=closed(q=closed(r={"const": "deep"}))),
    closed(points=listed(closed(x=SMALL, y=SMALL), 1)), closed(**{"a key": WORD, 'with "quotes"': SMALL}), closed(),
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    {"type": "object", "properties": {"a": SMALL}, "required": ["a", "b"], "additionalProperties": {"type": "null"}},
    {"type": "object", "patternProperties": {"^n_[a-z]{1,2}$": SMALL}, "additionalProperties": False,
     "maxProperties": 2},
    {"anyOf": [SMALL, WORD]}, {"anyOf": [closed(a=SMALL), closed(b=WORD)]}, {"oneOf": [{"type": "null"}, WORD]},
    {"oneOf": [closed(kind={"const": "circle"}, r=SMALL), closed(kind={"const": "box"}, w=SMALL, h=SMALL)]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 30}]},
    {"allOf": [{"type": "object", "properties": {"a": WORD}, "required": ["a"]}, closed(["a"], a=WORD, b=SMALL)]},
    {"$defs": {"p": closed(x=SMALL)}, "$ref": "#/$defs/p"}, {"$defs": {"w": WORD}, "type": "array", "maxItems": 2,
                                                             "items": {"$ref": "#/$defs/w"}},
    {"definitions": {"n": {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"},
     {"$ref": "#/definitions/n"}]}}, "required": ["next"], "additionalProperties": False}}, "$ref": "#/definitions/n"},
    {"type": ["string", "null"], "maxLength": 3},
    {"type": ["integer", "array"], "items": {"type": "null"}, "maxItems": 2,
                                                   "minimum": 0, "maximum": 5},
    closed(["unit"], unit={"enum": ["C", "F"]}, city=WORD), closed(when={"type": "string", "format": "date"}, n=SMALL),
    {"title": "T", "description": "d", "default": 1, "examples": [2], **SMALL}, {"type": "object", "maxProperties": 0},
    {"type": "array", "maxItems": 0}, closed(unicode={"enum": ["héllo", "日本", "🙂", "tab\there"]}),
]  # fmt: skip


@pytest.fixture(scope="module")
def tale():
    """A model of 1,662 tokens."""
    with slimrt.Model(MODELS / "tale-llama.gguf", n_ctx=512) as model:
        yield model


@pytest.fixture(scope="module")
def tokenizer(tale):
    return tale.tokenizer


def drawn(grammar: Grammar, tokenizer: Tokenizer, rows: np.ndarray, seed: int, limit: int = 400) -> tuple[bytes, bool]:
    """A text that a model of random logits writes, and whether it is complete."""
    sampler, matcher, tokens = (
        core.Sampler(temperature=1.0, top_p=1.0, min_p=0.0, top_k=0, seed=seed),
        grammar.matcher(),
        [],
    )
    while not matcher.is_done and len(tokens) < limit:
        token = sampler.sample(rows[(seed + len(tokens)) % len(rows)], matcher.mask())
        if token in tokenizer.eog_ids:
            break
        for one in (token, None):
            for each in matcher.forced() if one is None else [one]:
                matcher.accept(each)
                tokens.append(each)
    return b"".join(map(tokenizer.token_bytes, tokens)), matcher.is_complete


@pytest.fixture(scope="module")
def rows(tokenizer):
    """Logits float32 (rows, vocab), with some leaning to what closes strings and brackets, so that texts end."""
    rows = np.random.default_rng(5).standard_normal((97, tokenizer.vocab_size), np.float32) * 2
    closing = [id for id in range(tokenizer.vocab_size) if re.search(rb'["}\]]', tokenizer.token_bytes(id))]
    rows[:, closing] += 4
    return rows


def test_there_are_enough_schemas():
    assert len(SCHEMAS) >= 60 and len({json.dumps(one) for one in SCHEMAS}) == len(SCHEMAS)


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_answers_validate(tokenizer, rows, schema):
    grammar = compile_grammar(tokenizer, tokenizer.vocab_size, json_schema=schema)
    kind = jsonschema.Draft202012Validator if not isinstance(schema.get("items"), list) else jsonschema.Draft7Validator
    checker = kind(schema, format_checker=jsonschema.FormatChecker(FORMATS))
    checker.check_schema(schema)
    texts, complete = set(), 0
    for seed in range(50):
        text, ended = drawn(grammar, tokenizer, rows, seed)
        if ended:
            checker.validate(json.loads(text.decode()))
            texts.add(text)
        complete += ended
    assert complete >= 45, f"{complete} of 50 texts ended"


@pytest.mark.parametrize(
    ("constraint", "full"),
    [
        ({"regex": r"[a-f]{2,5}(/[0-9]+)?\.txt"}, r"[a-f]{2,5}(/[0-9]+)?\.txt"),
        ({"regex": "a\nb|\\(c\\)"}, "a\nb|\\(c\\)"),
        ({"choice": ["yes", "no", 'a "quote"\\\n', "日本"]}, 'yes|no|a "quote"\\\\\n|日本'),
        ({"choice": ["\0\x7f\x1b", "\x7f\x80\u2028"]}, "\0\x7f\x1b|\x7f\x80\u2028"),
        (
            {"grammar": 'start: "(" item ("," item)* ")"\nitem: /[0-9]{1,2}/ | "x"'},
            r"\(([0-9]{1,2}|x)(,([0-9]{1,2}|x))*\)",
        ),
        (
            {"grammar": 'root ::= sign? [0-9]{1,3} unit\nsign ::= "-" | "+"\nunit ::= " km" | " m" # end'},
            r"[-+]?\d{1,3} k?m",
        ),
        (
            {"grammar": r'root ::= "\x41\u00e9ab\x22\u005c\n" [\u00e9-\u00eb\x2d\u4e00] [^\x00-\uffff] [a&&b] # "\x'},
            'Aéab"\\\\\n[é-ë\\-一][\U00010000-\U0010ffff][a&b]',
        ),
    ],
    ids=["regex", "newline", "choice", "controls", "lark", "gbnf", "codes"],
)
def test_texts_of_other_grammars_match(tokenizer, rows, constraint, full):
    grammar = compile_grammar(tokenizer, tokenizer.vocab_size, **constraint)
    texts = [drawn(grammar, tokenizer, rows, seed) for seed in range(50)]
    assert all(re.fullmatch(full, text.decode()) for text, ended in texts if ended)
    assert sum(ended for _, ended in texts) >= 45 and len(set(texts)) >= 2


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({"json_schema": {"not": {"type": "string"}}}, r'json_schema: .*"not"'),
        ({"json_schema": {"properties": {"a": {"type": "array", "uniqueItems": True}}}}, '"uniqueItems"'),
        ({"json_schema": {"type": "array", "contains": {}}}, '"contains"'),
        ({"json_schema": {"type": "object", "propertyNames": {}}}, '"propertyNames"'),
        ({"json_schema": {"if": {}, "then": {}}}, '"if", "then"'),
        (
            {"json_schema": closed(a={"prefixItems": [WORD], "additionalItems": False})},
            "say what follows these in items",
        ),
        ({"json_schema": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "oneOf"),
        ({"json_schema": {"not": {}, "x-guidance": {"lenient": True}}}, '"not"'),
        ({"json_schema": {"type": "string", "format": "colour"}}, "colour"),
        ({"json_schema": {"type": "strin"}}, "strin"),
        ({"json_schema": {"$ref": "http://example.org/s"}}, "example.org"),
        ({"json_schema": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
        ({"json_schema": {"enum": []}}, "json_schema: "),
        ({"json_schema": "{"}, "json_schema is not JSON"),
        ({"json_schema": "[1]"}, "must be an object"),
        ({"json_schema": {"const": {1, 2}}}, "what JSON can hold"),
        ({"regex": "a(?!b)"}, "regex: .*look-around"),
        ({"regex": "("}, "regex: "),
        ({"choice": []}, "at least one"),
        ({"choice": ["a", ""]}, "none may be empty"),
        ({"choice": ["\ud800"]}, "not valid Unicode"),
        ({"regex": "a\ud800"}, "not valid Unicode"),
        ({"json_schema": {"const": "a\ud800"}}, "not valid Unicode"),
        ({"json_schema": '{"const": "\\ud800"}'}, "not valid Unicode"),
        ({"grammar": "start: b"}, 'grammar: .*"b"'),
        ({"grammar": "b: /x/"}, "grammar: .*start"),
        ({"grammar": 'root ::= "a'}, "grammar: not GBNF: line 1, '\"a'"),
        ({"grammar": "root ::= b"}, "not GBNF: there is no rule 'b'"),
        ({"grammar": 'a ::= "b"'}, "not GBNF: there is no rule 'root'"),
        ({"grammar": r'root ::= "a\q"'}, r"not GBNF: there is no escape .q"),
        ({"grammar": 'root ::= ({0} "a")'}, "not GBNF: .0. has nothing to repeat"),
        ({"grammar": r'root ::= "a\x00"'}, r"a literal cannot have .x00: write \[.x00\]"),
        ({"grammar": r"root ::= [a\ud800]"}, "no character has the code .ud800"),
        ({"grammar": "start: /" + "a" * MAX_TEXT + "/"}, f"at most {MAX_TEXT}"),
        ({"regex": "x" * MAX_TEXT}, f"at most {MAX_TEXT}"),
        ({"grammar": "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(5000))}, "more than 500 rules"),
        ({"grammar": "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1}\n" for i in range(5000))}, "more than 500 rules"),
        ({"json_schema": {"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(5000)}}}, "500 references"),
        ({"json_schema": '{"items":' * 20000 + "{}" + "}" * 20000}, "json_schema is not JSON"),
        ({"json_schema": '{"items":' * 500 + "{}" + "}" * 500}, "recursion limit"),
        ({"regex": "(" * 5000 + "a" + ")" * 5000}, "regex: "),
        ({"json_schema": {"allOf": [{"$ref": "#/$defs/none"}]}}, "none"),
        ({"json_schema": {"type": "integer", "minimum": -1e20, "maximum": -1e19}}, "minimum is -1e.20: .* beyond 2.63"),
        ({"json_schema": {"type": "integer", "minimum": 1e19}}, "minimum is 1e.19"),
        ({"json_schema": closed(enum={"allOf": [{"type": "number", "maximum": -1e19}, {"type": "integer"}]})}, "2.63"),
        (
            {"json_schema": {"$ref": "#/default", "default": {"type": "integer", "minimum": -(2**63)}}},
            "default has bounds",
        ),
        ({"json_schema": {"type": "integer", "multipleOf": 9999991}}, "multipleOf is 9999991, and at most 100000"),
        ({"json_schema": {"allOf": [{"multipleOf": 991}, {"multipleOf": 997}]}}, "taken together, are 988027"),
        ({"grammar": 'start: %json // of\n {"type": "integer", "minimum": -1e20, "maximum": -1e19}'}, "2.63"),
        ({"grammar": "start: %json {1}"}, "what follows %json is no JSON"),
        ({"grammar": 'start: %json {"a":' + "[" * 900 + "]" * 900 + "}"}, "nested too deep"),
        ({"json_schema": '{"a":' + "[" * 900 + "]" * 900 + "}"}, "nested too deep"),
        ({"json_schema": {"$ref": "#"}}, "it refers only to itself"),
        ({"grammar": '{"grammars": [{"json_schema": {"multipleOf": 9999991}}]}'}, "the grammar is JSON"),
    ],
)
def test_what_cannot_be_enforced_is_named_before_anything_is_computed(tale, constraint, words):
    told = []
    with pytest.raises(GrammarError, match=f"(?s){words}") as caught:
        tale.generate(PROMPT, on_progress=lambda *step: told.append(step), **constraint)
    assert isinstance(caught.value, ValueError) and "backtrace" not in str(caught.value) and not told


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"regex": "a", "choice": ["a"]}, ValueError, "regex and choice each say"),
        ({"regex": "a", "num_beams": 2, "temperature": 0.0}, ValueError, "does not go with num_beams"),
        ({"regex": "a", "ignore_eos": True}, ValueError, "ignore_eos does not go with regex"),
        ({"regex": 3}, TypeError, "regex must be text"),
        ({"choice": "yes"}, TypeError, "choice must be a sequence"),
        ({"grammar": 3}, TypeError, "grammar must be text"),
        ({"guided_json": {}}, TypeError, "here it is called json_schema"),
    ],
)
def test_options_that_do_not_go_together(tale, options, error, words):
    with pytest.raises(error, match=words):
        tale.generate(PROMPT, **options)


def test_a_model_holds_to_it(tale):
    schema = closed(name=WORD, n=SMALL, kind={"enum": ["alpha", "beta"]})
    results = tale.generate([PROMPT, "a"], n=3, json_schema=schema, temperature=1.5, seed=3, max_tokens=200)
    for one in results[0] + results[1]:
        jsonschema.validate(json.loads(one.text), schema)
        assert one.finish_reason == "stop" and tale.detokenize(one.tokens) == one.text
    streamed = tale.stream(PROMPT, json_schema=json.dumps(schema), temperature=1.5, seed=3, max_tokens=200)
    assert "".join(streamed) == results[0][0].text and streamed.result.finish_reason == "stop"


def test_texts_beside_it_are_free(tale):
    from slimrt.generation.generate import Run, run_texts
    from slimrt.generation.options import Options

    runtime, settings = tale._runtime, {"temperature": 0.9, "max_tokens": 20}
    free, held = Options(**settings), Options(**settings, regex="[0-9]{30}")
    runs = [Run(runtime, tale.tokenize(PROMPT), options, 7, None, 0.0) for options in (free, held, free)]
    first, second, third = run_texts(runtime, runs, free)
    assert first.text == third.text == tale.generate(PROMPT, seed=7, **settings).text
    assert re.fullmatch("[0-9]{1,30}", second.text)


def test_what_is_forced_is_not_chosen(tale):
    """With logprobs every token is chosen; the text is the same, the steps are fewer without."""
    schema, steps = closed(greeting={"const": "hello there"}, kind={"enum": ["alpha", "beta"]}), {}
    for logprobs in (0, 1):
        told = []
        options = {"json_schema": schema, "temperature": 0.0, "logprobs": logprobs, "max_tokens": 100}
        result = tale.generate(PROMPT, on_progress=lambda *step, told=told: told.append(step), **options)
        steps[result.text, result.tokens] = sum(what == "decode" for what, *_ in told)
        assert len(result.logprobs or ()) == (len(result.tokens) if logprobs else 0)
    assert len(steps) == 1 and result.finish_reason == "stop"
    fewer = tale.generate(PROMPT, json_schema=schema, temperature=0.0, max_tokens=100)
    assert fewer.tokens == result.tokens and fewer.usage.completion_tokens == len(result.tokens)


def test_why_a_text_ends(tale):
    options = {"temperature": 0.0, "regex": "abcdefghij"}
    whole = tale.generate(PROMPT, max_tokens=50, **options)
    assert (whole.text, whole.finish_reason) == ("abcdefghij", "stop")
    n = len(whole.tokens)
    assert tale.generate(PROMPT, max_tokens=n, **options).finish_reason == "stop"
    cut = tale.generate(PROMPT, max_tokens=n - 1, **options)
    assert cut.finish_reason == "length" and whole.tokens[:-1] == cut.tokens
    assert tale.generate(PROMPT, max_tokens=0, **options).finish_reason == "length"
    stopped = tale.generate(PROMPT, max_tokens=50, stop="ef", **options)
    assert (stopped.text, stopped.finish_reason) == ("abcd", "stop")
    with slimrt.Model(MODELS / "tale-llama.gguf", n_ctx=32) as small:
        full = small.generate([5] * 28, max_tokens=-1, regex="[a-z]{100}", temperature=0.0)
        assert full.finish_reason == "context" and full.truncated and 28 + len(full.tokens) == 33
        shifted = small.generate([5] * 28, max_tokens=-1, regex="[a-z]{40}", temperature=0.0, on_overflow="shift")
        assert shifted.finish_reason == "stop" and re.fullmatch("[a-z]{40}", shifted.text) and shifted.shifted


def test_a_logits_processor_is_masked_too(tale):
    text = tale.generate(PROMPT, choice=["yes", "no"], logits_processor=lambda ids, logits: np.zeros_like(logits)).text
    assert text in ("yes", "no")


def test_a_copy_goes_its_own_way(tokenizer):
    matcher = compile_grammar(tokenizer, tokenizer.vocab_size, choice=["aa", "bb"]).matcher()
    a, b = (tokenizer.encode(one, False)[0] for one in "ab")
    other = matcher.copy()
    matcher.accept(a)
    other.accept(b)
    assert matcher.forced() == [a] and other.forced() == [b] and not matcher.is_done
    matcher.accept(a)
    assert matcher.is_done and matcher.is_complete and not other.is_complete
    with pytest.raises(GrammarError):
        other.accept(a)


def test_a_vocabulary_is_built_once_and_goes_with_its_tokenizer(tokenizer):
    import gc
    import weakref

    assert vocabulary_of(tokenizer, 1662) is vocabulary_of(tokenizer, 1662)
    mine = Tokenizer(MODELS / "tale-chat.gguf")
    built = weakref.ref(vocabulary_of(mine, mine.vocab_size))
    assert built() is not None
    del mine
    gc.collect()
    assert built() is None


def test_control_tokens_are_no_text():
    """Also where the grammar has the characters that they are written with."""
    tokenizer = Tokenizer(MODELS / "tale-chat.gguf")
    control = next(text for text, id in tokenizer.special_tokens.items() if id in tokenizer.eog_ids)
    matcher = compile_grammar(tokenizer, tokenizer.vocab_size, choice=[control + "!"]).matcher()
    allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
    assert len(allowed) and not set(allowed.tolist()) & tokenizer.vocabulary.control


@pytest.mark.parametrize("name", ["llama-spm", "phi-3", "llama-bpe", "qwen2", "gpt-2"])
def test_other_vocabularies(name):
    """SentencePiece's too, which puts a space before a text that it encodes."""
    tokenizer = Tokenizer(third_party(f"tokenizers/ggml-vocab-{name}.gguf"))
    schema = closed(city={"const": "Zürich 日本"}, n={"type": "integer", "minimum": 0, "maximum": 99})
    grammar = compile_grammar(tokenizer, tokenizer.vocab_size, json_schema=schema)
    flat = np.zeros((1, tokenizer.vocab_size), np.float32)
    for seed in range(10):
        text, ended = drawn(grammar, tokenizer, flat, seed)
        assert ended
        jsonschema.validate(json.loads(text.decode()), schema)


def test_a_vocabulary_whose_normalizer_drops_control_characters(tmp_path):
    """As Marian's and T5's do: a text is tokenised as in the middle of another all the same, without a space."""
    n_tokens = marian_directory(tmp_path)
    tokenizer = opened(vocabulary_fields(tmp_path, "bart", n_tokens)[0])
    assert tokenizer.encode("\x02no", False, False) == tokenizer.encode("no", False, False)
    flat = np.zeros((1, n_tokens), np.float32)
    grammar = compile_grammar(tokenizer, n_tokens, choice=["no", "none of them"])
    assert {drawn(grammar, tokenizer, flat, seed)[0] for seed in range(10)} <= {b"no", b"none of them"}


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({"json_schema": {"type": "object"}}, "json_schema: every text that matches has '{', which no token of this"),
        ({"grammar": 'start: "a" "{" "b"'}, "grammar: every text that matches has '{', which no token of this model"),
    ],
)
def test_what_a_vocabulary_cannot_write_is_refused_before_anything_is_computed(constraint, words):
    """T5's has no braces."""
    tokenizer = Tokenizer(MODELS / "tale-t5.gguf")
    with pytest.raises(GrammarError, match=f"^{words}"):
        compile_grammar(tokenizer, tokenizer.vocab_size, **constraint)
    with pytest.raises(GrammarError, match="^no text matches: .*no token of this model can write what comes next"):
        compile_grammar(tokenizer, tokenizer.vocab_size, regex="[{}]").matcher().mask()


def test_what_a_vocabulary_cannot_write_in_the_middle_of_a_text():
    """Then nobody knows before that the text gets there."""
    tokenizer = Tokenizer(MODELS / "tale-t5.gguf")
    matcher = compile_grammar(tokenizer, tokenizer.vocab_size, grammar='start: "a" ("{" | "b{")').matcher()
    with pytest.raises(GrammarError, match="no token of this model can write what comes next$"):
        for text in "ab":
            matcher.accept(tokenizer.encode(text, False, False)[-1])
            matcher.forced()
            matcher.mask()


def test_a_vocabulary_without_an_end():
    """Its texts end only where nothing can follow."""
    tokenizer = Tokenizer(MODELS / "tale-llama.gguf")
    tokenizer.eog_ids = frozenset()
    matcher = compile_grammar(tokenizer, tokenizer.vocab_size, regex="a?").matcher()
    assert matcher.is_complete and not matcher.is_done
    allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
    assert [tokenizer.token_bytes(int(id)) for id in allowed] == [b"a"]
    matcher.accept(int(allowed[0]))
    assert matcher.is_done


def test_without_llguidance_it_says_what_to_install(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for constraint in ({"regex": "a"}, {"grammar": 'root ::= "a"'}):
        with pytest.raises(slimrt.UnsupportedError, match=r"pip install 'slimrt\[grammar\]'"):
            compile_grammar(tokenizer, 7, **constraint)


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, {"minimum": -(2**63) + 1024, "maximum": 2**63 - 1024}),
        ({"maximum": 2**64 - 1, "exclusiveMinimum": 5}, {"maximum": 2**63 - 1024, "exclusiveMinimum": 5}),
        ({"minimum": -1.7976931348623157e308, "maximum": 1.5}, {"maximum": 1.5}),
        ({"maximum": 2**53 + 3}, {"maximum": 2**53 + 2}),
        ({"properties": {"minimum": {"const": 1e30}, "default": {"minimum": -(2**63)}}},
         {"properties": {"minimum": {"const": 1e30}, "default": {"minimum": -(2**63) + 1024}}}),
        ({"const": {"a": None}, "enum": [1e30, None]}, {"const": {"a": None}, "enum": [1e30, None]}),
        ({"properties": {"a": {"multipleOf": 991}, "b": {"multipleOf": 0.997}}}, None),
    ],
)  # fmt: skip
def test_bounds_of_64_bits_are_kept_within_what_is_told_apart(schema, told):
    """What is generated is of the schema: no bound becomes wider, and those that no double passes are left out."""
    assert enforceable(schema) == (schema if told is None else told)


@pytest.mark.parametrize(
    ("regex", "text"),
    [(r"https:\/\/x", "https://x"), ("a/b", "a/b"), ("a\nb", "a\nb"), ("a\\\nb", "a\nb"), (r"a\\/b", r"a\/b")],
)
def test_slashes_and_lines_in_patterns(tale, regex, text):
    assert tale.generate(PROMPT, regex=regex, max_tokens=40).text == text


def test_gbnf_and_lark_are_told_apart():
    assert "::=" not in source_of("grammar", 'root ::= start\nstart ::= "a"')
    for lark in ('start: "a"', 'start: "a ::= b"'):
        assert source_of("grammar", lark) == lark


@pytest.mark.parametrize(
    ("grammar", "taken", "refused"),
    [
        ("root ::= . .*", ["\n", "日\n\r"], [""]),
        ('root ::= word " end"\nword ::= [a-z ]+', ["an end", "a end end"], [" end", "an end "]),
        ('root ::= "<" .* ">" [a-z]+ "."', ["<a>b.", "<>a>b."], ["<>.", "<a>b"]),
        ('root ::= (([0-9]+)? ("b"{2})* ("c"?)+){1,2}', ["", "12bb", "1bbcc2", "bbbb"], ["b", "c1c2c3"]),
        (
            'root ::= start |\n  ( | "-") Start-1 # [\nstart ::= "a" # "\nStart-1 ::= "b"\r\n',
            ["a", "b", "-b"],
            ["-a", "-"],
        ),
        (
            'root ::= "a" (("b" | "c") d){0} "e"* d{0,0} | "f" [g]+{0}\nd ::= "h"',
            ["a", "aee", "f"],
            ["", "ab", "fg", "ah"],
        ),
        ('root ::= "b"{2}* ("c" "d"?)+{2} r*+\nr ::= "<" root ">"', ["cc", "bbbbcdc<cc>"], ["bbb", "bbbcc", "bbcd"]),
        ('root ::= "a"{2,} "b"{00,1} "c"{2}', ["aacc", "aaabcc"], ["acc", "aabc", "aabbcc"]),
        ("root ::= [+--] [-^a-] [&&~~]", [",^~", "--&", "+a&"], ["/a&", "-b&"]),
        ('root ::= "(" root ")" | ("x"* "y")?', ["", "((xxy))", "()"], ["(x)", "(()"]),
        (r'root ::= "\[/\]" [\[/"\]]', ["[/][", "[/]/", '[/]"', "[/]]"], ["[/]\\"]),
        ('root ::= "a"\nroot ::= "b"', ["b"], ["a"]),  # as in llama.cpp, the later one counts
    ],
)
def test_gbnf_takes_all_that_llama_cpp_does(tokenizer, grammar, taken, refused):
    compiled = compile_grammar(tokenizer, tokenizer.vocab_size, grammar=grammar)

    def takes(text):
        matcher = compiled.matcher()
        try:
            for id in compiled.vocabulary.ids_of(text.encode()):
                matcher.accept(id)
        except slimrt.GrammarError:
            return False
        return matcher.is_complete

    assert [text for text in taken + refused if takes(text)] == taken


@pytest.mark.parametrize(
    "text",
    [
        "root ::= (",
        'root ::= "a"{,3}',
        "root ::= {0}",
        'root ::= "a" | {0}',
        'root ::= "a" | *',
        "root ::= (+)",
        "root ::= ?",
        'root ::= ("a"\na ::= "b")',
        'root ::= "a")',
        "root ::= (\n",
    ],
)
def test_brackets_of_gbnf_that_do_not_match_or_apply(text):
    with pytest.raises(slimrt.GrammarError, match="not GBNF"):
        lark_of(text)


def test_rules_of_gbnf_are_counted_once(tale):
    """Their two colons, and those in literals, were counted: 500 colons were too many."""
    rules = "".join(f'a{i} ::= ":" a{i + 1}\n' for i in range(490))
    assert tale.generate(PROMPT, grammar=f'root ::= a485\n{rules}a490 ::= "x"', max_tokens=9).text == ":::::x"


def test_rules_of_lark_are_counted_and_not_their_colons(tale):
    rules = "".join(f'a{i}: ":::" a{i + 1}\n' for i in range(490))
    assert tale.generate(PROMPT, grammar=f'start: a488\n{rules}a490: "x"\n | "x:"', max_tokens=9).text[:7] == "::::::x"
    chain = {"$ref": "#/$defs/a0", "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(5000)}}
    for schema in (json.dumps(chain), json.dumps(chain).replace("$ref", r"\u0024ref")):
        with pytest.raises(slimrt.GrammarError, match="more than 500 rules"):
            tale.generate(PROMPT, grammar=f"start: %json {schema}")


def test_long_gbnf_takes_no_long_time():
    """Each would take minutes if its time grew with the square of its length."""
    assert source_of("grammar", "\n" * 262_000 + "!").endswith("!")
    assert lark_of(f"root ::= [{'ab' * 100_000}]").startswith("start: ")
    for bounds in ("1," + " " * 200_000, "1," + "9" * 5000 + "}"):
        with pytest.raises(slimrt.GrammarError, match="not GBNF"):
            lark_of('root ::= "a"{' + bounds)
    nested = '("x" ' * 20_000 + '"a"' + ")+*" * 20_000
    for text in ('"a"' + "*" * 200_000, "(" * 50_000 + '"a"' + ")+*" * 50_000, nested):
        with pytest.raises(slimrt.GrammarError, match="within each other"):
            lark_of(f"root ::= {text}")


def test_openais_response_formats(tale):
    schema = closed(a=SMALL)
    formats = [
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}, schema),
        ({"type": "json_object", "schema": schema}, schema),
        ({"type": "json_object", "schema": None}, {"type": "object"}),
    ]
    for format, wanted in formats:
        answer = tale.create_completion(PROMPT, response_format=format, max_tokens=300, seed=2, temperature=0.2)
        (choice,) = answer["choices"]
        same = tale.generate(PROMPT, json_schema=wanted, max_tokens=300, seed=2, temperature=0.2)
        assert choice["text"] == same.text
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["text"]), wanted)
    plain = tale.create_completion(PROMPT, response_format={"type": "text"}, seed=2)
    assert plain["choices"] == tale.create_completion(PROMPT, response_format=None, seed=2)["choices"]
    with pytest.raises(slimrt.UnsupportedError, match="response_format of type 'xml'"):
        tale.create_completion(PROMPT, response_format={"type": "xml"})
    for wrong in ("json", {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "n"}}):
        with pytest.raises(TypeError, match="response_format"):
            tale.create_completion(PROMPT, response_format=wrong)
    with pytest.raises(GrammarError, match="uniqueItems"):
        tale.create_completion(PROMPT, response_format={"type": "json_object", "schema": {"uniqueItems": True}})


def test_the_command(run, tmp_path, clean_environment):
    model, more = MODELS / "tale-chat.gguf", ("-n", "60", "--temp", "1", "-s", "1", "-q")
    schema, grammar = closed(a={"enum": [1, 22]}), 'root ::= "x" [0-9]{3}'
    (tmp_path / "s.json").write_text(json.dumps(schema))
    (tmp_path / "g.gbnf").write_text(grammar)
    command = ("generate", model, "-p", "a", "--no-display-prompt", *more)
    for flag, value in (
        ("--json-schema", json.dumps(schema)),
        ("-j", tmp_path / "s.json"),
        ("-jf", tmp_path / "s.json"),
    ):
        code, out, _ = run(*command, flag, value)
        assert code == 0 and json.loads(out)["a"] in (1, 22)
    for flag, value in (("--grammar", grammar), ("--grammar-file", tmp_path / "g.gbnf")):
        code, out, _ = run(*command, flag, value)
        assert code == 0 and re.fullmatch("x[0-9]{3}\n", out)
    assert run(*command, "--choice", "yes", "--choice", "no")[1] in ("yes\n", "no\n")
    assert re.fullmatch("[pq]{4}\n", run("chat", model, "-p", "a", "--regex", "[pq]{4}", *more)[1])
    code, out, err = run(*command, "-j", '{"uniqueItems": true}')
    assert code != 0 and out == "" and 'Unimplemented keys: ["uniqueItems"]' in err
    code, out, err = run(*command, "--grammar", tmp_path / "none")
    assert code != 0 and "none" in err


def test_masks_are_made_while_the_step_runs(tale, monkeypatch):
    """Each mask waits for its step to begin: made before it, it would wait for ever."""
    from slimrt.generation.sequences import Sequences

    begun, threads, append, mask = threading.Event(), set(), Sequences.append, Matcher.mask
    begun.set()  # the first mask comes before all steps

    def slow(matcher):
        assert begun.wait(20), "the step waits for the mask"
        begun.clear()
        threads.add(threading.current_thread().name)
        return mask(matcher)

    def watched(*arguments):
        begun.set()
        return append(*arguments)

    monkeypatch.setattr(Matcher, "mask", slow)
    monkeypatch.setattr(Sequences, "append", watched)
    made, seconds = MASKS.made, MASKS.seconds
    text = tale.generate(PROMPT, regex="[a-d]{3}x[a-d]{2}", temperature=1.0, logprobs=1, seed=1).text
    assert re.fullmatch("[a-d]{3}x[a-d]{2}", text) and all("slimrt-masks" in one for one in threads)
    assert MASKS.made >= made + 2 and MASKS.seconds > seconds


def test_a_mask_that_fails_ends_its_own_text_alone(tale, monkeypatch):
    from slimrt.generation.generate import Run
    from slimrt.generation.loop import loop_of
    from slimrt.generation.options import Options

    mask = Matcher.mask

    def failing(matcher):
        if matcher is bad._matcher and bad.tokens:
            raise GrammarError("too much work")
        return mask(matcher)

    def run(regex):
        return Run(tale._runtime, tale.tokenize(PROMPT), Options(regex=regex), 7, None, 0.0)

    bad, good = run("[0-9]{30}"), run("[a-z]{5}")
    monkeypatch.setattr(Matcher, "mask", failing)
    loop = loop_of(tale._runtime)
    tickets = [loop.submit(one.task(), eager=True) for one in (bad, good)]
    while not all(one.done for one in tickets):
        loop.step()
    assert re.fullmatch("[a-z]{5}", tickets[1].result().text)
    with pytest.raises(GrammarError, match="too much work"):
        tickets[0].result()


def test_a_first_mask_that_fails_is_told_before_anything_is_computed(tale, monkeypatch):
    def failing(matcher):
        raise GrammarError("no token spells that")

    monkeypatch.setattr(Matcher, "mask", failing)
    told = []
    with pytest.raises(GrammarError, match="no token spells that"):
        tale.generate(PROMPT, choice=["yes"], on_progress=lambda *step: told.append(step))
    assert told == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_the_child_of_a_fork_makes_masks_too(tale):
    assert tale.generate(PROMPT, choice=["yes", "no"]).text in ("yes", "no")
    child = os.fork()
    if child == 0:
        os._exit(0 if tale.generate(PROMPT, choice=["yes", "no"]).text in ("yes", "no") else 1)
    end = time.monotonic() + 30
    while (found := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    assert os.waitstatus_to_exitcode(found[1]) == 0
