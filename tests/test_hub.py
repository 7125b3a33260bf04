"""Models named by a repository of Hugging Face's hub, beside a server of its protocol on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path

import pytest

import slimrt
from conftest import GOLDEN, PROMPT
from hub_server import TOKEN, Hub, Repository
from slimrt.errors import DownloadError, UnsupportedError
from slimrt.modelfile import hub as hub_names
from slimrt.modelfile.hub import HubName, located
from slimrt.modelfile.hub_files import choose, type_of
from test_shards import split
from tiny_model import write_tiny

pytestmark = pytest.mark.unsanitized  # Python: the core is tested by others

NAMES = ["m-BF16.gguf", "m-IQ1_S.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q8_0.gguf", "mmproj-m-F16.gguf"]


@pytest.fixture
def hub(monkeypatch, tmp_path, clean_environment):
    """A hub with nothing in it, and an empty cache. Its address is read when huggingface_hub is imported."""
    from huggingface_hub import constants

    served = Hub()
    server = served.start()
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("SLIMRT_CACHE_DIR", str(tmp_path / "slimrt"))
    for name, value in {
        "ENDPOINT": served.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": served.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "hf"),
        "HF_TOKEN_PATH": str(tmp_path / "token"),
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(constants, name, value)
    yield served
    server.shutdown()
    server.server_close()


@pytest.fixture
def offline(hub, monkeypatch):
    """Sets HF_HUB_OFFLINE, and forgets what was asked so far."""

    def begin():
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        hub.requests.clear()

    return begin


@pytest.fixture
def models(hub, tiny, grouped):
    """org/tiny-GGUF, of two types."""
    files = {"README.md": b"#", "tiny-F32.gguf": tiny.read_bytes(), "tiny-Q8_0.gguf": grouped.read_bytes()}
    hub.repositories["org/tiny-GGUF"] = Repository(files)
    return hub


# ---------------------------------------------------------------- names
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("hf://org/repo", ("org/repo", "", None)),
        ("org/repo", ("org/repo", "", None)),
        ("org/repo:Q4_K_M", ("org/repo", "Q4_K_M", None)),
        ("org/repo.v1-GGUF:sub/m-00001.gguf@refs/pr/1", ("org/repo.v1-GGUF", "sub/m-00001.gguf", "refs/pr/1")),
        ("hf://org/repo@v2", ("org/repo", "", "v2")),
        ("hf://org/model.gguf", ("org/model.gguf", "", None)),
        ("models/typo.gguf", None), ("models/typo.BIN", None), ("model", None), ("a/b/c", None), ("../repo", None),
        ("~/repo", None), ("org/repo:", None), ("/org/repo", None),
    ],
)  # fmt: skip
def test_what_is_a_name(text, wanted):
    name = HubName.parse(text)
    assert (name and (name.repo, name.wanted, name.revision)) == wanted
    assert name is None or name.is_plain != text.startswith("hf://")


def test_what_lies_here_comes_first(hub, tmp_path, monkeypatch, tiny):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    shutil.copy(tiny, tmp_path / "org" / "repo")
    assert located("org/repo") == Path("org/repo")
    with pytest.raises(FileNotFoundError, match="org/rep: no such file or directory .hf://org/rep names a repository"):
        located("org/rep")  # a slip of the pen is not asked of others
    assert located("nowhere.gguf") == Path("nowhere.gguf") and not hub.requests
    for wrong in ("hf://repo", "hf://a/b/c", "hf://"):
        with pytest.raises(ValueError, match=r"names no repository: write hf://ORG/REPO\[:FILE or TYPE\]"):
            located(wrong)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://huggingface.co/org/repo/resolve/main/a/m.gguf?download=true", "hf://org/repo:a/m.gguf$"),
        ("https://hf.co/org/repo", "hf://org/repo$"),
        ("https://huggingface.co/org/repo/blob/v1/m.gguf", "hf://org/repo:m.gguf@v1$"),
        ("https://example.org/m.gguf", "https://example.org/m.gguf: .*download it and give its path$"),
    ],
)
def test_urls_are_refused_with_what_to_type(run, url, said):
    with pytest.raises(UnsupportedError, match=said):
        slimrt.Model(url)
    code, _, err = run("generate", url)  # where Path makes one slash of two
    assert code == 1 and "https://" in err


def test_weights_alone_are_refused_with_what_to_type(run):
    """Of the file itself was said that it is no GGUF, or to download it again."""
    file = GOLDEN / "llama_mha" / "model.safetensors"
    with pytest.raises(UnsupportedError, match="model.safetensors has weights alone: name its directory"):
        slimrt.Model(file)
    assert "has weights alone" in run("plan", file)[2]


# ---------------------------------------------------------------- files
@pytest.mark.parametrize(
    ("wanted", "file"),
    [("", "m-Q4_K_M.gguf"), ("q8_0", "m-Q8_0.gguf"), ("Q4_K_S", "m-Q4_K_S.gguf"), ("bf16", "m-BF16.gguf"),
     ("*q8_0.gguf", "m-Q8_0.gguf"),
     ("m-IQ1_S.gguf", "m-IQ1_S.gguf"), ("mmproj-m-F16.gguf", "mmproj-m-F16.gguf")],
)  # fmt: skip
def test_a_file_is_chosen_by_type_or_name(wanted, file):
    assert choose("o/r", NAMES, wanted).files == (file,)
    assert (choose("o/r", NAMES, wanted).why == " (of BF16, IQ1_S, Q4_K_M, Q4_K_S, Q8_0)") == (not wanted)


def test_without_the_usual_type_it_is_the_first_that_runs():
    assert choose("o/r", ["a-IQ1_M.gguf", "b-Q5_K_M.gguf", "c-Q6_K.gguf"]).model == "b-Q5_K_M.gguf"
    assert choose("o/r", ["only.gguf", "only-mmproj.gguf", "imatrix.gguf"]) == choose("o/r", ["only.gguf"])
    for wanted in ("Q4_K", "q4", "F16", "K_M"):  # not a part of another's name, and no projector
        with pytest.raises(DownloadError, match=f"o/r has no '{wanted}'; it has BF16, IQ1_S, Q4_K_M, Q4_K_S, Q8_0"):
            choose("o/r", NAMES, wanted)
    assert [type_of(name) for name in ("x-UD-Q4_K_XL.gguf", "BF16/x-00001-of-00002.gguf", "x.gguf", "q8b.gguf")] == [
        "Q4_K_XL", "BF16", "", "",
    ]  # fmt: skip


def test_shards_come_together():
    names = [f"Q4_K_M/m-Q4_K_M-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    for wanted in ("", "Q4_K_M", names[0], names[2]):
        chosen = choose("o/r", [*names, "m-Q8_0.gguf"], wanted)
        assert chosen.model == names[0] and chosen.files == tuple(names)
    with pytest.raises(DownloadError, match="has not all of .*: Q4_K_M/m-Q4_K_M-00002-of-00003.gguf is missing"):
        choose("o/r", names[::2])


def test_a_repository_without_gguf():
    plain = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "chat_template.jinja"]
    plain += ["additional_chat_templates/tool_use.jinja", "1_Pooling/config.json"]
    others = ["pytorch_model.bin", "onnx/model.onnx", "consolidated.safetensors", "model.fp16.safetensors", "a.md",
              "original/params.json", "examples/a.jinja"]  # fmt: skip
    assert choose("o/r", plain + others) == hub_names.Chosen("", tuple(sorted(plain)))
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)] + ["model.safetensors.index.json", "config.json"]
    assert set(choose("o/r", [*shards, "consolidated.00.pth"]).files) == set(shards)
    with pytest.raises(DownloadError, match="no 'q8_0' and no GGUF file: give o/r alone .*--outtype"):
        choose("o/r", plain, "q8_0")
    with pytest.raises(DownloadError, match="model.safetensors has weights alone: give o/r without a file's name"):
        choose("o/r", plain, "model.safetensors")
    with pytest.raises(UnsupportedError, match="no GGUF file and no config.json with safetensors.*it has .bin, .onnx"):
        choose("o/r", ["config.json", *others[:2]])
    with pytest.raises(DownloadError, match="name a file: o/r:ggml-base.bin; it has ggml-base.bin, ggml-tiny.bin"):
        choose("o/r", ["ggml-base.bin", "ggml-tiny.bin"])
    assert choose("o/r", ["ggml-base.bin", "ggml-tiny.bin"], "ggml-tiny.bin").model == "ggml-tiny.bin"


# ---------------------------------------------------------------- fetching
def test_a_model_is_fetched_once(models, run, tiny, offline):
    code, out, err = run("generate", "org/tiny-GGUF", "-p", PROMPT, "-n", 4, "--temp", 0)
    assert code == 0 and out.startswith(PROMPT)
    assert "slimrt: fetching org/tiny-GGUF:tiny-F32.gguf (of F32, Q8_0), 124.8 KiB, into " in err
    assert models.fetched() == ["tiny-F32.gguf"]
    assert out == run("generate", tiny, "-p", PROMPT, "-n", 4, "--temp", 0)[1]
    again = run("generate", "org/tiny-GGUF", "-p", PROMPT, "-n", 4, "--temp", 0)
    assert again[1] == out and "slimrt: org/tiny-GGUF:tiny-F32.gguf (of F32, Q8_0)" in again[2]
    assert models.fetched() == ["tiny-F32.gguf"]
    offline()
    assert run("generate", "hf://org/tiny-GGUF", "-p", PROMPT, "-n", 4, "--temp", 0, "-q") == (0, out, "")
    assert not models.requests


def test_every_way_in_knows_names(models, run, tmp_path, grouped):
    name = "hf://org/tiny-GGUF:q8_0"
    with slimrt.Model(name, n_ctx=64) as model:
        assert "tiny-Q8_0.gguf" in repr(model)
    assert slimrt.plan(name, n_ctx=64).path.endswith("tiny-Q8_0.gguf")
    assert slimrt.ModelSource(name).fingerprint == slimrt.ModelSource(grouped).fingerprint
    for verb in (("plan", name), ("inspect", name), ("convert", name, "-o", tmp_path / "out.gguf")):
        assert run(*verb)[0] == 0
    assert (tmp_path / "out.gguf").is_file() and models.fetched() == ["tiny-Q8_0.gguf"]


def test_all_shards_are_fetched(hub, tiny, tmp_path, offline):
    shards = split(tiny, tmp_path)
    hub.repositories["org/split"] = Repository({path.name: path.read_bytes() for path in shards})
    with slimrt.Model("org/split", n_ctx=64) as model, slimrt.Model(tiny, n_ctx=64) as whole:
        assert (model.logits([3, 1, 4]) == whole.logits([3, 1, 4])).all()
    assert sorted(hub.fetched()) == [path.name for path in shards]
    offline()
    first = located("org/split")
    first.with_name(shards[1].name).unlink()
    with pytest.raises(DownloadError, match="m-00002-of-00003.gguf is missing: that is what the cache holds"):
        located("org/split")


def test_a_directory_is_fetched_without_what_is_not_read(hub, run, tmp_path):
    files = {path.name: path.read_bytes() for path in (GOLDEN / "llama_mha").iterdir() if path.suffix != ".npz"}
    files |= {"additional_chat_templates/rag.jinja": b"r", "pytorch_model.bin": b"x", "onnx/model.onnx": b"x"}
    hub.repositories["org/dense"] = Repository(files)
    code, out, err = run("inspect", "org/dense", "--json")
    assert code == 0 and "converting dense once, " in err and "rag.jinja" in hub.fetched()
    assert not {"pytorch_model.bin", "model.onnx"} & set(hub.fetched())
    report = json.loads(out)
    assert report["metadata"]["general.name"] == "dense" and report["path"].startswith(str(tmp_path / "hf"))
    assert [one.name.rpartition("-")[0] for one in (tmp_path / "slimrt").glob("*.gguf")] == ["dense"]
    assert "converting" not in run("inspect", "org/dense")[2]


def test_a_download_that_broke_off_goes_on(models, tiny, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    models.breaks_after["tiny-F32.gguf"] = 5000
    assert located("org/tiny-GGUF:f32").read_bytes() == tiny.read_bytes()
    assert [line.split()[-1] for line in models.requests if "bytes=" in line] == ["bytes=5000-"]


def test_ctrl_c_does_not_wait_for_threads(models, monkeypatch):
    def interrupted(*arguments, **settings):
        assert threading.current_thread() is threading.main_thread()
        raise KeyboardInterrupt

    monkeypatch.setattr("huggingface_hub.file_download.http_get", interrupted)
    with pytest.raises(KeyboardInterrupt):
        located("org/tiny-GGUF")


def test_bars_only_where_they_are_shown(models, capsys):
    located("org/tiny-GGUF:f32", show_progress=False)
    assert capsys.readouterr() == ("", "")
    bars = [("bytes", "B"), ("bytes.transfer", "B"), ("files", "it")]
    assert [hub_names._bar(True, "f")(total=9, unit=unit, name=name).disable for name, unit in bars] == [
        False,
        True,
        True,
    ]
    assert hub_names._bar(False, "f")(total=9, unit="B", name="bytes").disable


# ---------------------------------------------------------------- what goes wrong
def error_of(name: str) -> str:
    with pytest.raises(DownloadError) as caught:
        located(name)
    assert isinstance(caught.value, slimrt.SlimrtError) and isinstance(caught.value, OSError)
    return str(caught.value)


def test_what_the_hub_refuses(models, tiny, monkeypatch, run):
    url = models.url
    assert error_of("org/none").startswith(
        f"org/none: no such file or directory, and no such repository on {url}; if it is private, give a token of an "
    )
    assert error_of("hf://org/none").startswith(f"hf://org/none: no such repository on {url}")
    assert error_of("org/tiny-GGUF@v9") == "org/tiny-GGUF has no revision 'v9'"
    assert error_of("org/tiny-GGUF:q5_0") == "org/tiny-GGUF has no 'q5_0'; it has F32, Q8_0"
    assert "org--x/y: no name of a repository: Cannot have --" in error_of("org--x/y")
    models.repositories["org/gated"] = Repository({"m.gguf": tiny.read_bytes()}, gated=True)
    models.repositories["org/private"] = Repository({"m.gguf": tiny.read_bytes()}, private=True)
    assert error_of("org/gated") == (
        f"org/gated is gated: accept its terms at {url}/org/gated, then give a token of an account that may read it: "
        "HF_TOKEN, or hf auth login"
    )
    assert "no such repository" in error_of("org/private")
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    assert f"org/private: {url} refuses the token that it was given" in error_of("org/private")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert located("org/private").is_file() and located("org/gated").is_file()
    code, out, err = run("generate", "org/none", "-p", "x")
    assert (code, out) == (1, "") and err.count("\n") == 1 and "org/none: no such file or directory, and no" in err


def test_offline_and_not_in_the_cache(models, offline, tmp_path):
    located("org/tiny-GGUF:q8_0")
    offline()
    assert located("org/tiny-GGUF").name == "tiny-Q8_0.gguf"  # what there is
    assert error_of("hf://org/other") == (
        f"hf://org/other is not in the cache ({tmp_path / 'hf'}), and HF_HUB_OFFLINE is set: unset it to fetch the "
        "model, or copy the cache of a machine that has it"
    )
    assert error_of("org/other").startswith("org/other: no such file or directory, and as a repository it is not in")
    assert error_of("org/tiny-GGUF:f32").startswith(
        "org/tiny-GGUF has no 'f32'; it has Q8_0: that is what the cache holds"
    )
    assert not models.requests


@pytest.mark.parametrize("is_down", [True, False], ids=["503", "refused"])
def test_a_hub_that_cannot_be_reached(models, monkeypatch, run, is_down):
    wanted = located("org/tiny-GGUF:f32")
    models.is_down = is_down
    if not is_down:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    code, _, err = run("inspect", "org/tiny-GGUF:f32")
    assert code == 0 and "cannot be reached (" in err and "looking for org/tiny-GGUF in the cache" in err
    assert located("org/tiny-GGUF:f32") == wanted
    assert "cannot be reached: try again with a connection" in error_of("org/tiny-GGUF:q8_0")


def test_no_room(models, monkeypatch, tmp_path):
    usage = namedtuple("usage", "total used free")(10**6, 10**6 - 5000, 5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    said = error_of("org/tiny-GGUF:f32")
    assert (
        said.startswith("org/tiny-GGUF:tiny-F32.gguf needs 124.8 KiB ")
        and f"in {tmp_path / 'hf'}, 4.9 KiB free" in said
    )
    assert "HF_HOME" in said and models.fetched() == []


def test_the_environment_of_huggingface_hub_counts(models, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": models.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
    models.repositories["org/tiny-GGUF"].private = True
    program = "from slimrt.modelfile.hub import located; print(located('org/tiny-GGUF:q8_0'))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"{tmp_path}/home/hub/models--org--tiny-GGUF/"), done.stderr
    assert done.stderr == ""


def test_a_tiny_model_of_the_usual_type_is_taken(hub, tmp_path):
    path = write_tiny(tmp_path / "m-q4_k_m.gguf")
    hub.repositories["org/m"] = Repository({"m-f16.gguf": b"no model", "m-q4_k_m.gguf": path.read_bytes()})
    assert located("org/m").name == "m-q4_k_m.gguf"
