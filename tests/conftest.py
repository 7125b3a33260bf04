# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 (what NumPy reads when it is imported is set before)
"""What several test files share: the committed tiny models, third-party fixtures, tolerances, the command."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

# Before NumPy is there: matrices of the tests are small, and more threads wait for each other (twice as long).
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# What "auto" means, also where there is a GPU: who wants that names it.
os.environ["SLIMRT_DEVICE"] = "cpu"

import numpy as np
import pytest

import pairwise
from remembered import remembered
from seq2seq_models import MODELS, write
from shares import Share
from slimrt import _core
from tiny_model import write_tiny

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # so a shell starts background jobs, and their children
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # so nohup does
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"
FIXTURES = TESTS.parent.parent / "shared" / "fixtures"

# avx_vnni is avx2 but for products of quantised weights, avx512_halves avx512 but for one token's of 16 bits, amx but
# for those of many tokens: they are tested for PRODUCT_ISAS, and by test_kernels_tiles.py.
PRODUCT_ISAS = [isa for isa in _core.ops.backends() if not isa.startswith("amx")]
ISAS = [isa for isa in PRODUCT_ISAS if isa not in ("avx_vnni", "avx512_halves")]
# Types that models are held in with 16 rows side by side: on every instruction set, and where vectors hold 8 rows.
SIXTEENS = ["q4_1", "q5_0", "q5_1", "q2_k", "q3_k"]
WIDE_SIXTEENS = ["q4_0", "q4_k", "q5_k", "iq4_nl", "iq4_xs", "mxfp4"]
# Why there is no CUDA device; "" if there is one. Operations are tested on each of DEVICES.
CUDA_MISSING = "" if _core.cuda_devices()[0] else _core.cuda_devices()[1]
DEVICES = [
    *ISAS,
    pytest.param("cuda", marks=pytest.mark.skipif(bool(CUDA_MISSING), reason=f"no CUDA device: {CUDA_MISSING}")),
]


def lies_side_by_side(type_name: str, isa: str) -> bool:
    """Whether whole sixteens of rows of a type do."""
    return type_name in SIXTEENS or (type_name in WIDE_SIXTEENS and isa.startswith(("avx", "amx")))


def product_unit(device: str, type_name: str) -> float:
    """What a GPU rounds the other factors to where it multiplies weights or rows of a type with many at once: half a
    unit in the last place of f16 or bf16, relative; beside float32, and on the CPU, nothing."""
    if device != "cuda" or type_name == "f32":
        return 0.0
    return 2.0**-8 if type_name == "bf16" else 2.0**-11


PROMPT = "the cat sat"
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def third_party(name: str) -> Path:
    """A file or directory under ../shared/fixtures; without that folder the test is skipped."""
    path = FIXTURES / name
    if not FIXTURES.is_dir():
        pytest.skip("../shared/fixtures is absent")
    assert path.exists(), f"../shared/fixtures is there, {name} is not in it"
    return path


def ids_of(seed: int, n: int) -> np.ndarray:
    """Random token ids (n,) of the small models, without their control tokens."""
    return np.random.default_rng(seed).integers(3, 100, n).astype(np.int32)


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference, relative to the largest value; not a number anywhere: infinite."""
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    difference = np.abs(np.asarray(got, np.float64) - wanted)
    return float(difference.max() / np.abs(wanted).max()) if np.isfinite(difference).all() else float("inf")


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) if np.isfinite(x).all() else float("inf")


def values_of(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a GGUF file, unpacked."""
    from slimrt.modelfile.gguf import read_gguf

    return {name: tensor.values() for name, tensor in read_gguf(path).tensors.items()}


@pytest.fixture(scope="session", autouse=True)
def converted_directories_stay_here(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Directories that slimrt converts on loading go here, not into the user's cache; so do conversations it keeps."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def convert(tmp_path_factory: pytest.TempPathFactory):
    """convert(directory) -> the GGUF slimrt makes of it, made once a session; of a golden once for all that share what
    is remembered."""
    import slimrt

    made: dict[Path, Path] = {}

    def converted(source: Path) -> Path:
        if source not in made:
            out = tmp_path_factory.mktemp("gguf") / f"{source.name}.gguf"
            if source.parent == GOLDEN:
                out.write_bytes(_converted_golden(source.name))
            else:
                slimrt.convert(source, out)
            made[source] = out
        return made[source]

    return converted


@remembered
def _converted_golden(name: str) -> bytes:
    import slimrt

    with TemporaryDirectory() as folder:
        return slimrt.convert(GOLDEN / name, Path(folder) / f"{name}.gguf").path.read_bytes()


@pytest.fixture(scope="session")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As much of the shipped calibration text as inputs of 256 need: with all of it conversions take twice as long."""
    path = tmp_path_factory.mktemp("calibration") / "calibration.txt"
    path.write_text((TESTS.parent / "models" / "calibration.txt").read_text()[:6500])
    return path


@pytest.fixture(scope="session")
def seq2seq(tmp_path_factory: pytest.TempPathFactory):
    """seq2seq(name) -> a model of seq2seq_models as a Hugging Face directory, made once a session."""
    made: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if MODELS[name].fixture:
            return third_party(MODELS[name].fixture)
        if name not in made:
            made[name] = write(name, tmp_path_factory.mktemp("hf") / name)
        return made[name]

    return directory


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Multi-head attention with RoPE: kv and k are legal."""
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    """Grouped-query attention: only kv is legal."""
    return write_tiny(tmp_path_factory.mktemp("model") / "grouped.gguf", n_kv_heads=2)


@pytest.fixture(scope="module")
def model(tiny):
    import slimrt

    with slimrt.Model(tiny, n_ctx=64) as model:
        yield model


@pytest.fixture
def clean_environment(monkeypatch):
    """No SLIMRT_ variable of the caller's."""
    for name in list(os.environ):
        if name.startswith("SLIMRT_"):
            monkeypatch.delenv(name)


@pytest.fixture
def run(capsys):
    """run(*arguments) -> (exit code, stdout, stderr), in this process."""
    from slimrt.cli import main

    def call(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as error:
            code = error.code
        return code, *capsys.readouterr()

    return call


def open_engine(path: Path, mode: str | list[str] = "kv", dtype: str = "f32", **options):
    """A native engine; what its mode needs derived comes from the reference and folds.py, not from slimrt.folding.fold.
    Mode k+r: a residual of RANK columns in the type of k, unless the options say otherwise."""
    from slimrt import _core

    options = {"cache_type_k": dtype, "cache_type_v": dtype} | options
    if "k+r" in mode:
        options = {"rank": RANK, "residual_type": dtype} | options
    if "derived" not in options:
        options["derived"] = derived(path, mode, options["cache_type_k"], options.get("rank", RANK))
    return _core.Engine(str(path), cache=mode, **options)


RANK = 24  # all of V in the golden models with two KV heads, so that k+r is exact in f32


def derived(path: Path, mode: str | list[str], dtype: str = "f32", rank: int = RANK) -> dict[str, np.ndarray]:
    """W_KV of the layers in mode k, W_VK of those in mode v, and the folds of k+r and xr: [out, in] float32."""
    if mode == "kv":
        return {}
    return dict(_derived(Path(path), mode if isinstance(mode, str) else tuple(mode), dtype, rank))


@remembered
def _derived(path: Path, mode: str | tuple[str, ...], dtype: str, rank: int) -> dict[str, np.ndarray]:
    from folds import fold_all
    from reference import Reference

    model = Reference(path)
    modes = [mode] * len(model.w.layers) if isinstance(mode, str) else mode
    made = {f"blk.{i}.attn_kv.weight": model.w_kv(i) for i, m in enumerate(modes) if m == "k"}
    made |= {f"blk.{i}.attn_vk.weight": model.w_vk(i) for i, m in enumerate(modes) if m == "v"}
    made = {name: np.ascontiguousarray(w.T, np.float32) for name, w in made.items()}
    return made | fold_all(model, modes, dtype, rank)


def decode(engine, ids: np.ndarray, n_prefill: int, sequence: int | None = None) -> np.ndarray:
    """Logits of all ids: a prompt, then one token at a time."""
    sequence = engine.new_sequence() if sequence is None else sequence
    steps = [np.asarray(ids[:n_prefill], np.int32)] if n_prefill else []
    steps += [np.asarray([token], np.int32) for token in ids[n_prefill:]]
    return np.concatenate([engine.append([(sequence, step)], all_logits=True) for step in steps])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", action="store_true", help="of a test with many cases a share (tests/shares.py)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("share"):
        config.pluginmanager.register(Share())
    pairwise.with_nightly = "not nightly" not in config.option.markexpr


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Attention beside rows of every type is slow without a GPU, and tests/cpp has it too. Under sanitizers kernels see
    every type, models one of each kind: plain rows (f32, f16), rows with a scale (q8), rows in groups (q4); and of
    encoder-decoders whose layers are the same, one."""
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        dtype = params.get("dtype")
        if params.get("isa") == "cuda" and dtype in ("bf16", "fp8_e4m3", "fp8_e5m2", "q4"):
            item.add_marker(pytest.mark.slow_emulated)
        if dtype in ("bf16", "fp8_e4m3", "fp8_e5m2") and not item.path.name.startswith("test_kernels"):
            item.add_marker(pytest.mark.unsanitized)
        if params.get("name") in ("marian", "m2m_100", "pegasus"):
            item.add_marker(pytest.mark.slow_emulated)
            item.add_marker(pytest.mark.unsanitized)


def pytest_collection_finish() -> None:
    """What was collected is there until the end: a collection of garbage that looks at it takes half a second."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter) -> None:
    """Why tests were skipped, and how many: tests that wait for a GPU, a package or ../shared would go unnoticed."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.fixture
def opened(monkeypatch):
    """Opens scripted models in place of real ones; notes how."""
    from scripted import scripted_model

    seen = {}

    def use(path, make):
        def open_model(args, source, n_ctx, n_seqs=1):
            seen["n_seqs"] = n_seqs
            return scripted_model(source.path, make(n_seqs))

        for verb in ("transcribe", "text2text", "forecast"):
            monkeypatch.setattr(f"slimrt.cli.{verb}.open_model", open_model)
        return str(path), seen

    return use
