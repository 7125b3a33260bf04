"""Memory of a real generate run beside what `slimrt plan` says, in a fresh process.

    python benchmarks/memory.py --shape smollm2-1.7b --ctx 2048
    python benchmarks/memory.py --shape mistral-7b-2layers --ctx 32768 --prompt 32700   # rows behind the window leave

Private memory (smaps_rollup: Private_Clean + Private_Dirty) counts the mapped weights too, as long as no other process
maps the same file; anonymous memory counts what slimrt allocated.
"""

from __future__ import annotations

import argparse

import models

import slimrt


def kilobytes(*names: str) -> int:
    """Bytes of these lines of /proc/self/smaps_rollup, added up."""
    total = 0
    with open("/proc/self/smaps_rollup") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key in names:
                total += int(value.split()[0]) * 1024
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(models.SHAPES), default="smollm2-1.7b")
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=16, help="tokens generated after it")
    parser.add_argument("--cache", default="kv")
    args = parser.parse_args()
    path = models.make(models.SHAPES[args.shape])

    from slimrt import _core

    private, anonymous = kilobytes("Private_Clean", "Private_Dirty"), kilobytes("Anonymous")
    with slimrt.Model(path, n_ctx=args.ctx, cache=args.cache, progress=False) as model:
        model.generate([1 + i % 999 for i in range(args.prompt)], max_tokens=args.tokens, ignore_eos=True)
        private = kilobytes("Private_Clean", "Private_Dirty") - private
        anonymous = kilobytes("Anonymous") - anonymous
    plan = _core.plan(str(path), n_ctx=args.ctx, cache=args.cache)
    cache, total, mapped = (plan[key] / 2**20 for key in ("cache", "total", "mapped"))
    print(f"plan: cache {cache:.1f} MiB, allocated {total:.1f} MiB, mapped {mapped:.1f} MiB")
    print(f"private above import: {private / 2**20:.1f} MiB = {private / (plan['total'] + plan['mapped']):.3f} of plan")
    print(f"anonymous above import: {anonymous / 2**20:.1f} MiB = {anonymous / plan['total']:.3f} of plan's allocated")


if __name__ == "__main__":
    main()
