"""slimrt serve: an HTTP server with OpenAI's API."""

from __future__ import annotations

import argparse
import ipaddress
import os
from typing import TYPE_CHECKING

from slimrt.cache.config import CacheChoice
from slimrt.cache.placement import placed
from slimrt.cache.planner import Planner
from slimrt.cache.server_sizes import places
from slimrt.cli.common import Flags, cache_arguments, model_source, note, open_model, show_progress
from slimrt.cli.values import between, count, not_empty, positive, real, size, whole
from slimrt.errors import UnsupportedError, WontFitError
from slimrt.generation.loop import loop_of, prefixes_of
from slimrt.generation.store import PrefixStore
from slimrt.model import Model
from slimrt.modelfile.source import ModelSource
from slimrt.plumbing.files import read_text
from slimrt.plumbing.units import format_bytes, parse_bytes
from slimrt.runtime.drafting import with_draft

if TYPE_CHECKING:
    from slimrt.server.guard import Access
    from slimrt.server.limits import Limits


def add_flags(flags: Flags) -> None:
    flags.model()
    flags.add("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen; another than the loopback "
              "address needs a key (default: %(default)s)")  # fmt: skip
    flags.add("--port", type=whole(0, 65535), default=8080, metavar="N", help="0: any free port (default: "
              "%(default)s)")  # fmt: skip
    flags.add("-np", "--parallel", type=positive, default=4, metavar="N", help="texts decoded together "
              "(default: %(default)s)")  # fmt: skip
    flags.add("--max-queue", type=count, metavar="N", help="texts that may wait; more get status 429 (default: "
              "4 times --parallel)")  # fmt: skip
    flags.add("--queue-timeout", type=real(0), default=60.0, metavar="SECONDS", help="longest time that a "
              "request waits to begin, else status 503 (default: %(default)s)")  # fmt: skip
    flags.add("--request-timeout", type=real(0), default=600.0, metavar="SECONDS", help="longest time of "
              "a request, which then ends with what it has (default: %(default)s)")  # fmt: skip
    flags.add("--ray", type=positive, metavar="N", help="N replicas on the running Ray cluster, else on this "
              "machine, each with --threads CPUs (default: equal parts) and --parallel texts")  # fmt: skip
    flags.draft()
    flags.group("access")
    flags.add("--api-key", metavar="KEY", help="key that clients must send; better in SLIMRT_API_KEY or a file, "
              "since others see command lines")  # fmt: skip
    flags.add("--api-key-file", metavar="FILE", help="file of keys, one on each line")
    flags.add("--no-auth", action="store_true", help="listen on other addresses without a key")
    flags.add("--cors-origins", metavar="LIST", default="", help="origins of pages that may use the server, "
              "separated by commas, such as https://example.org; *: all")  # fmt: skip
    flags.engine(several=True)
    flags.add(
        "--prefix-dir", type=not_empty, metavar="DIR", help="keep cached prefixes in this folder, across restarts"
    )
    flags.add("--prefix-disk", type=size, default="4GiB", metavar="SIZE", help="most disk space for them (default: "
              "%(default)s)")  # fmt: skip
    flags.group("prefill beside decoding")
    flags.add("--stall-ms", type=positive, default=400, metavar="N", help="longest time that a text waits for a chunk "
              "of another's prefill (default: %(default)s)")  # fmt: skip
    flags.add("--prefill-share", type=between, default=0.8, metavar="P", help="least share of the time for prefill "
              "while texts are decoded (default: %(default)s)")  # fmt: skip
    flags.output()


def run(args: argparse.Namespace) -> int:
    try:
        from slimrt.server.guard import Access, is_loopback
        from slimrt.server.limits import Limits
        from slimrt.server.run import bind, serve
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "slimrt":
            raise
        raise UnsupportedError(f"serve needs {error.name}: pip install 'slimrt[serve]'") from None
    keys = _keys(args)
    if not keys and not args.no_auth and not is_loopback(args.host):
        args.usage_error(f"--host {args.host} is open to others: give a key (--api-key-file, SLIMRT_API_KEY), or "
                         "--no-auth to let everybody use it")  # fmt: skip
    source = model_source(args)
    origins = tuple(one.strip().rstrip("/").lower() for one in args.cors_origins.split(",") if one.strip())
    access = Access(args.host, keys, origins)
    limits = Limits(
        parallel=args.parallel,
        max_queue=args.max_queue,
        queue_timeout=args.queue_timeout,
        request_timeout=args.request_timeout,
    )
    if args.ray:
        return _on_ray(args, source, access, limits)
    listener = bind(args.host, args.port)
    port = listener.getsockname()[1]

    def load() -> Model:
        model = _loaded(args, source)
        note(args, f"slimrt: {source.name} is served at http://{_written(args.host)}:{port}"
             f"{'' if keys else ', to anybody there'}")  # fmt: skip
        return model

    return serve(listener, load, access, limits, log_requests=args.verbose > 0)


def _on_ray(args: argparse.Namespace, source: ModelSource, access: Access, limits: Limits) -> int:
    try:
        from slimrt.integrations import ray
    except ImportError as error:
        raise UnsupportedError(str(error)) from None

    def load(n_threads: int) -> Model:
        return _loaded(argparse.Namespace(**vars(args) | {"threads": n_threads}), source)

    ray.run(load, args.ray, args.threads, access, args.port, limits)
    return 0


def _loaded(args: argparse.Namespace, source: ModelSource) -> Model:
    model = _with_room(args, source)
    runtime = model._runtime
    pace = loop_of(runtime).pace
    pace.stall, pace.share = args.stall_ms / 1000, args.prefill_share
    if args.prefix_dir and source.kind != "text":
        raise UnsupportedError(f"--prefix-dir keeps prefixes of texts: {source.name} is {source.described}")
    store = PrefixStore(runtime, args.prefix_dir, parse_bytes(args.prefix_disk)) if args.prefix_dir else None
    if source.kind == "text":
        prefixes_of(runtime, store)
    return model


def _with_room(args: argparse.Namespace, source: ModelSource) -> Model:
    """Load the model, in the memory that the server leaves. WontFitError: with the memory that the server needs."""
    planner = Planner.of(source, args.memory_limit, args.parallel, args.batch_size or 512, args.threads, args.device,
                         args.cache_tokens or 0, places(args.parallel, args.max_queue) - args.parallel)  # fmt: skip
    planner = with_draft(planner, args.draft_model, show_progress(args))
    planner = placed(planner, [CacheChoice.of(**cache_arguments(args))], args.ctx or 0)
    left = argparse.Namespace(**vars(args) | {"device": planner.device,
                                              "draft_model": planner.draft or args.draft_model})  # fmt: skip
    if planner.device != "cpu":  # the engine takes little host memory: nothing needs to be subtracted
        return open_model(left, source, args.ctx or 0, n_seqs=args.parallel)
    beside = planner.server(source.defaults).total
    left.memory_limit = max(planner.limit - beside, 1)
    try:
        return open_model(left, source, args.ctx or 0, n_seqs=args.parallel)
    except WontFitError as error:
        said = (f"{error}. Of {format_bytes(planner.limit)} the server keeps {format_bytes(beside)} for logits, masks "
                "and requests that wait (--parallel, --max-queue)")  # fmt: skip
        raise WontFitError(said, error.needed, error.available, tuple(error.options)) from None


def _keys(args: argparse.Namespace) -> tuple[str, ...]:
    """All API keys, without white space around them, such as the end of line of a mounted secret.

    ValueError: a key file without keys. A flag or variable that is given but empty is wrong usage.
    """
    for flag, twin in (("api_key", "SLIMRT_API_KEY"), ("api_key_file", "SLIMRT_API_KEY_FILE")):
        given, variable = getattr(args, flag), os.environ.get(twin)
        value = variable if given is None else given
        if value is not None and not value.strip():
            said = twin if value == variable else f"--{flag.replace('_', '-')}"
            args.usage_error(f"{said} is empty, which would let anybody in: give it a value, or leave it out")
    keys = [args.api_key.strip()] if args.api_key else []
    if args.api_key_file:
        found = [line.strip() for line in read_text(args.api_key_file).splitlines() if line.strip()]
        if not found:
            raise ValueError(f"{args.api_key_file} holds no key: write one on each line")
        keys += found
    return tuple(keys)


def _written(host: str) -> str:
    """An address as in URLs."""
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host
