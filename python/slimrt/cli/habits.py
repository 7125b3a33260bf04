"""Flags and verbs of other programs, and what to use instead. Flags that only have another name there are not listed:
they are further names of the flags themselves."""

from __future__ import annotations

from typing import NamedTuple


class Habit(NamedTuple):
    """Flags of other programs that slimrt does not have.

    Attributes:
        names: of the flags.
        advice: what to do instead, or why nothing is needed.
        granted: values, in any case, that ask for what slimrt does anyway: accepted and ignored ("": the bare flag);
            None: the flag is always refused.
        verbs: to which this applies; (): all.
    """

    names: tuple[str, ...]
    advice: str
    granted: tuple[str, ...] | None = None
    verbs: tuple[str, ...] = ()


TEXT = ("generate", "chat")
LINES = ("translate", "text2text")
TEXTS = (*TEXT, *LINES)
SOUND = ("transcribe",)

HABITS = (
    # llama.cpp: how it computes
    Habit(("-fa", "--flash-attn"), "attention never stores its scores here: there is nothing to turn off",
          ("", "on", "auto", "1", "true")),
    Habit(("-ub", "--ubatch-size"), "there is one batch size: -b N, tokens in one step"),
    Habit(("-dev", "-mg", "--main-gpu"), "name devices in the order of layers: --device cuda:1, or cuda:0,cuda:1"),
    Habit(("-sm", "--split-mode", "-ts", "--tensor-split"),
          "devices share layers by the memory that is free, or as --device cuda:0=20,cuda:1=12 says"),
    Habit(("-ot", "--override-tensor", "-cmoe", "--cpu-moe",
           "-ncmoe", "--n-cpu-moe", "-nkvo", "--no-kv-offload", "--no-op-offload"),
          "a layer is on one device as a whole, with its cache: -ngl N has the last N on cuda"),
    Habit(("--list-devices",), "slimrt doctor lists the devices"),
    Habit(("--mlock",), "weights cannot be locked: they are mapped and read in place; allocations are touched when "
          "they are made"),
    Habit(("--mmap",), "weights are always mapped", ("",)),
    Habit(("--no-mmap",), "weights are always mapped; those that are repacked are copied"),
    Habit(("-tb", "--threads-batch"), "there is one number of threads, -t N"),
    Habit(("--numa", "--prio", "--prio-batch", "--poll", "--poll-batch", "-C", "--cpu-mask", "-Cr", "--cpu-range",
           "--cpu-strict"), "threads stay on the physical (or big) cores; -t N says how many, taskset or "
          "numactl where"),
    Habit(("-nr", "--no-repack"), "weights are repacked where that is faster; slimrt plan says how many"),
    Habit(("--warmup", "--no-warmup"), "nothing is warmed up", ("",)),
    Habit(("--check-tensors",), "a file is checked whenever it is opened", ("",)),
    Habit(("-md", "--model-draft"), "generate, chat and serve take it, plan counts it: nothing else continues a text"),
    Habit(("--draft", "--draft-max", "--draft-min"), "the number of drafted tokens follows from measured "
          "step times and accept rates"),
    Habit(("-hfd", "--hf-repo-draft"), "--draft-model takes ORG/REPO[:TYPE] too"),
    # llama.cpp: the model and its context
    Habit(("-mu", "--model-url", "-dr", "--docker-repo"), "download the file first, or name it on the Hugging Face "
          "Hub: -hf ORG/REPO[:TYPE]"),
    Habit(("-hft", "--hf-token"), "the token is HF_TOKEN in the environment, or what `hf auth login` kept"),
    Habit(("--offline",), "HF_HUB_OFFLINE=1 in the environment keeps off the network"),
    Habit(("--control-vector", "--control-vector-scaled"), "control vectors are not applied"),
    Habit(("--lora", "--lora-scaled"),
          "adapters are not applied while loading: slimrt convert MODEL --lora ADAPTER[:SCALE] -o OUT merges them"),
    Habit(("--override-kv",), "the metadata of a file are taken as they are"),
    Habit(("--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale", "--yarn-orig-ctx",
           "--yarn-ext-factor", "--yarn-attn-factor", "--yarn-beta-slow", "--yarn-beta-fast"),
          "positions are scaled as the file says, and not otherwise"),
    Habit(("-gan", "--grp-attn-n", "-gaw", "--grp-attn-w"), "the context is not stretched: make it larger with -c N"),
    Habit(("--no-context-shift",), "a full context is only shifted where --context-shift asks for it", ("",)),
    Habit(("--swa-full", "-dt", "--defrag-thold"), "rows behind the window are freed automatically"),
    Habit(("--prompt-cache", "--prompt-cache-all", "--prompt-cache-ro"),
          "contexts are kept with --save-session FILE and continued with --load-session FILE (slimrt generate)"),
    # llama.cpp: texts in and out
    Habit(("-cnv", "--conversation"), "a conversation", ("",), ("chat",)),
    Habit(("-cnv", "--conversation", "-i", "--interactive", "-if", "--interactive-first", "-mli", "--multiline-input"),
          "conversations are slimrt chat MODEL", None, ("generate",)),
    Habit(("-no-cnv", "--no-conversation"), "the text is continued as it is", ("",), ("generate",)),
    Habit(("-no-cnv", "--no-conversation"), "texts are continued by slimrt generate MODEL -p TEXT", None, ("chat",)),
    Habit(("-sys", "--system-prompt", "-sysf", "--system-prompt-file", "-st", "--single-turn", "--chat-template",
           "--chat-template-file", "--chat-template-kwargs"),
          "slimrt generate continues a text as it is; messages and templates are for slimrt chat", None, ("generate",)),
    Habit(("--jinja",), "chat templates are always read as Jinja", ("",)),
    Habit(("--no-jinja",), "chat templates are always read as Jinja"),
    Habit(("--in-prefix", "--in-suffix", "--in-prefix-bos"), "the chat template says what stands around a message"),
    Habit(("-r", "--reverse-prompt"), "texts end before --stop TEXT, which is left out of them", None, TEXT),
    Habit(("-bf", "--binary-file"), "give the file with -f"),
    Habit(("-sp", "--special"), "control tokens are never shown; --json has their ids"),
    Habit(("-ptc", "--print-token-count", "--perf", "--verbose-prompt"), "-v prints token counts and times at the end"),
    Habit(("--no-perf", "--simple-io"), "times are printed only with -v", ("",)),
    Habit(("-co", "--color", "--log-colors", "-pc", "--print-colors"), "texts are not coloured"),
    Habit(("-lv", "--verbosity", "--log-verbosity"), "-v prints more, -vv all"),
    Habit(("--log-disable",), "-q leaves only errors on stderr"),
    Habit(("--log-file",), "messages go to stderr: 2> FILE keeps them"),
    # llama.cpp: sampling
    Habit(("--samplers", "--sampling-seq", "--sampler-seq"), "the order of samplers is fixed: docs/architecture.md"),
    Habit(("--dynatemp-range", "--dynatemp-exp"),
          "there is no such sampler: --top-p, --min-p and --typical-p follow the certainty of the model"),
    # llama.cpp's other programs
    Habit(("--metrics", "--cont-batching", "-cb"), "it is always so", ("",), ("serve",)),
    Habit(("--slots", "-a", "--alias"), "GET /props and /metrics show the state", None, ("serve",)),
    Habit(("--max-num-seqs",), "texts decoded together are --parallel N", None, ("serve",)),
    Habit(("--max-model-len",), "the context is -c N", None, ("serve",)),
    Habit(("--batch",), "texts decoded together are --parallel N; tokens in one step are -b N", None, ("plan",)),
    Habit(("--ppl-stride",), "the tokens that a window scores are --stride N", None, ("perplexity",)),
    Habit(("--chunks",), "--tokens N limits the tokens that are scored", None, ("perplexity",)),
    Habit(("--kl-divergence", "--kl-divergence-base"), "--compare kv:q8 k:f16 ... measures it in one call", None,
          ("perplexity",)),
    Habit(("-pg",), "prefill and decode are measured one by one: -p N -n N", None, ("bench",)),
    Habit(("--allow-requantize", "--leave-output-tensor", "--pure"),
          "every tensor takes the type that --outtype says of it", None, ("convert",)),
    Habit(("--process-output",), "the output matrix is left out: it gets more bits", None, ("imatrix",)),
    Habit(("--outfile",), "the file to write is -o FILE", None, ("convert",)),
    # whisper.cpp and openai-whisper
    Habit(("-otxt", "--output-txt", "-osrt", "--output-srt", "-ovtt", "--output-vtt", "-oj", "--output-json", "-ocsv",
           "--output-csv", "-olrc", "--output-lrc"), "name the format and the folder: --format srt -o FOLDER", None,
          SOUND),
    Habit(("-of", "--output-file"), "the file or folder to write is -o", None, SOUND),
    Habit(("-tr", "--translate"), "--task translate", None, SOUND),
    Habit(("-nt",), "plain text has no times; --no-timestamps decodes without them", None, SOUND),
    Habit(("-ml", "--max-len", "-sow", "--split-on-word", "-owts", "--output-words"),
          "times of words: --word-timestamps --format json", None, SOUND),
    Habit(("-bs", "--beam-size"), "--num-beams N", None, SOUND),
    Habit(("-bo",), "--best-of N", None, SOUND),
    Habit(("--prompt",), "--initial-prompt TEXT", None, SOUND),
    Habit(("-np", "--no-prints"), "-q leaves only errors on stderr", None, SOUND),
    Habit(("-pp", "--print-progress"), "bars are shown on a terminal", ("",), SOUND),
    Habit(("-di", "--diarize", "-tdrz", "--tinydiarize"), "speakers are not told apart", None, SOUND),
    Habit(("--fp16",), "weights are used as stored; the type of cached rows is --cache-type", ("false",), SOUND),
    Habit(("--compute-type",), "weights are used as stored; the type of cached rows is --cache-type", None, SOUND),
    Habit(("--condition-on-previous-text",), "that is the default; --no-previous-text turns it off", ("true",), SOUND),
    Habit(("-vm", "--vad-model"), "--vad silero comes with its network: pip install 'slimrt[vad]'", None, SOUND),
    # Chronos
    Habit(("--prediction-length",), "-n N, steps", None, ("forecast",)),
    Habit(("--quantile-levels",), "--quantiles 0.1,0.5,0.9", None, ("forecast",)),
    # transformers, Ollama
    Habit(("--max-new-tokens", "--max-length", "--num-predict"), "-n N, most tokens to generate", None, TEXTS),
    Habit(("--do-sample",), "tokens are drawn unless --temp 0 asks for the likeliest", ("", "true"), TEXT),
    Habit(("--do-sample",), "--temp 1 draws tokens; without it they are the likeliest", None, LINES),
    Habit(("--repetition-penalty",), "--repeat-penalty R", None, TEXTS),
    Habit(("--stop-sequence", "--stop-sequences", "--stop-words"), "--stop TEXT, repeated for each", None, TEXTS),
    Habit(("--stream",), "texts are printed as they are made", ("", "true"), TEXT),
    Habit(("--stream",), "a text is printed when it is done", None, LINES),
    Habit(("-o", "--output", "--output-file"), "texts go to stdout: > FILE keeps them", None, TEXTS),
    # MLX
    Habit(("--max-kv-size",), "the context is -c N"),
    Habit(("--kv-bits",), "the cache's type is --cache kv:q8, or kivi or lowrank for fewer bits"),
)  # fmt: skip

VERB_HABITS = {
    "help": "slimrt --help, or slimrt VERB --help",
    "version": "slimrt --version",
    "quantize": "slimrt convert IN -o OUT --outtype q4_k_m",
    "export-lora": "slimrt convert MODEL --lora ADAPTER -o OUT",
    "merge": "slimrt convert MODEL --lora ADAPTER -o OUT",
    "quantise": "slimrt convert IN -o OUT --outtype q4_k_m",
    "run": "slimrt chat MODEL, or slimrt generate MODEL -p TEXT",
    "cli": "slimrt chat MODEL, or slimrt generate MODEL -p TEXT",
    "complete": "slimrt generate MODEL -p TEXT",
    "completions": "slimrt completion bash",
    "server": "slimrt serve MODEL",
    "pull": "slimrt generate -hf ORG/REPO -p TEXT, which downloads the model once",
    "download": "slimrt generate -hf ORG/REPO -p TEXT, which downloads the model once",
    "show": "slimrt inspect MODEL",
    "info": "slimrt inspect MODEL",
    "embed": "slimrt.Model(MODEL).embed(TEXT) in Python",
    "embedding": "slimrt.Model(MODEL).embed(TEXT) in Python",
    "fold": "slimrt convert IN -o OUT --cache k+r",
    "whisper": "slimrt transcribe MODEL AUDIO",
    "predict": "slimrt forecast MODEL CSV",
    "devices": "slimrt doctor",
    "benchmark": "slimrt bench MODEL",
    "ppl": "slimrt perplexity MODEL FILE",
}


def habit(name: str, verb: str) -> Habit | None:
    """The entry for a flag that a verb does not have, if there is one."""
    return next((one for one in HABITS if name in one.names and (not one.verbs or verb in one.verbs)), None)
