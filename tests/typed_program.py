# SPDX-License-Identifier: Apache-2.0
"""A user's program, for type checkers alone (tests/test_python_habits.py): nothing here is run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import slimrt
from slimrt import GenerateOptions, Generation, Model, Segment, Session


def texts(path: str) -> list[str]:
    options: GenerateOptions = {"max_tokens": 64, "temperature": 0.0, "stop": ["\n"]}
    with Model(path, cache="k+r:q8", n_ctx=2048, n_seqs=4) as m:
        one = m.generate("Once upon a time", **options)
        several = m.generate(["a", "b", "c"], max_tokens=8, seed=1)
        ids: list[int] = m.tokenize("Tom went to the mill.")
        by_ids = m.generate(ids, logprobs=2)
        for token in by_ids.logprobs or ():
            print(token.text, f"{token.logprob:.2f}")
        print(one.usage.prompt_tokens + one.usage.completion_tokens, one.timings.decode_tok_s)
        return [one.text, *(result.text for result in several), m.detokenize(by_ids.tokens)]


def pieces(m: Model, prompt: str) -> Iterator[str]:
    with m.stream(prompt, max_tokens=5) as stream:
        yield from stream
    print(stream.result.finish_reason)


def conversation(m: Model) -> Generation:
    return m.chat([{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}], temperature=0.2)


def context(m: Model, file: Path) -> NDArray[np.float32]:
    session: Session = m.session()
    logits = session.append(m.tokenize("Tom went to the mill."))
    with session.fork() as other:
        other.truncate(2)
        other.save(file)
    return np.concatenate([logits, m.load_session(file).append([1], last_only=True)])


def likelihoods(m: Model) -> float:
    score = m.score("Anna was a baker.")
    print(score, score.to_dict()["tokens"], score.perplexity)
    return score.log_likelihood + float(score.logprobs.min()) + m.perplexity("Anna was a baker.", stride=2)


async def at_once(m: Model) -> tuple[str, int]:
    result = await m.agenerate("a", max_tokens=4)
    results = await m.agenerate(["a", "b"], max_tokens=4)
    async with aclosing(m.astream("a", max_tokens=4)) as pieces:
        async for piece in pieces:
            print(piece, end="")
    return result.text, len(results)


def speech(path: str, sounds: list[str]) -> list[Segment]:
    whisper = Model(path)
    segments, info = whisper.transcribe("talk.mp3", word_timestamps=True, language="en")
    print(info.language, info.duration, [word.start for word in segments[0].words or ()])
    for segments, _ in whisper.transcribe(sounds, num_beams=2):
        print(*segments, sep="\n")
    heard, _ = whisper.transcribe(np.zeros(16000, np.float32), sample_rate=16000)
    return heard


def translations(path: str) -> list[str]:
    one = slimrt.Model(path, n_seqs=4).translate("A house.", source="English", target="German", num_beams=4).text
    t5 = slimrt.Model(path)
    several = t5.translate(["A house.", "A mouse."], source="English", target="German")
    summary = t5.text2text("summarize: ...", max_tokens=30).text
    return [one, summary, *(each.text for each in several), *(each.text for each in t5.text2text([[5, 1], [6, 1]]))]


def forecast(path: str, series: NDArray[np.float64]) -> NDArray[np.float32]:
    return slimrt.Model(path).predict_quantiles(series, 24, (0.1, 0.5, 0.9))


def vectors(m: Model) -> list[tuple[int, ...]]:
    tokens = m.embed(["a", "b"], pooling=None)
    return [
        m.embed("a").shape,
        m.embed(["a", "b"], pooling="last", normalize=False).shape,
        m.embed([np.array([1, 2]), np.array([3])]).shape,
        tuple(m.generate([(1, 2), (3,)])[0].tokens),
        *(one.shape for one in tokens),
    ]


def answers(m: Model) -> str:
    whole = m.create_chat_completion([{"role": "user", "content": "hi"}], max_tokens=8, logprobs=True, top_logprobs=2)
    for chunk in m.create_completion("a", stream=True):
        print(chunk["choices"][0]["text"], end="")
    print(m("a", echo=True)["usage"], m.create_embedding(["a"])["data"])
    return str(whole["choices"][0]["message"]["content"])


def files(path: Path) -> bool:
    plan = slimrt.plan(path, n_ctx=32768, memory_limit="6GiB")
    print(plan, [row.total for row in plan.rows if row.fits])
    report = slimrt.convert(path, "small.gguf", cache="auto", target_error=0.01, verify=True)
    print(report, [layer.mode for layer in report.layers])
    comparison = slimrt.compare_caches(path, "text", ["kv:q8", "k+r:q8"])
    return plan.fits and all(row.kl_mean < 0.01 for row in comparison.front())


def main() -> None:
    try:
        with Model("model.gguf", memory_limit="6GiB") as m:
            print(conversation(m), *pieces(m, "a"), context(m, Path("s.session")).shape, likelihoods(m))
            print(asyncio.run(at_once(m)), vectors(m), answers(m))
        Model.from_pretrained("org/name", "*q8_0.gguf", n_ctx=2048).close()
    except slimrt.WontFitError as error:
        print(error.needed, error.available, *error.options)
    except slimrt.SlimrtError as error:
        print(error)
