"""Measure a model on math, commonsense or code problems: average@k with a 95 % interval, and pass@k.

    python examples/evaluate.py --task math --model_name_or_path out/qwen2.5-math-1.5b-dapo --output_dir out/eval/gmts
    python examples/evaluate.py --task math --model_name_or_path out/lora --benchmarks aime-2024 problems.jsonl \
        --backend transformers --output_dir out/eval/lora --compare_to out/eval/base

Writes into `--output_dir`, for each problem set, its answers (`<set>.answers.jsonl`: a line with the settings, then a
line for each problem), and for all of them `results.json` and `results.md`, a table beside the paper's numbers. Run it
again after an interruption and it goes on where it stopped; with --backend transformers the files are then the same as
without the interruption.

Sets are loaded by name from the hub, or from a local .jsonl, .json or .parquet file with the same columns. Left to
others: what the intervals mean (`evaluate_statistics.py`), where the sets are and what the paper reports
(`evaluate_benchmarks.py`), prompts and scores (`trl_gmts.tasks`).
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl import TrlParser

from evaluate_benchmarks import BENCHMARKS, PAPER, Benchmark
from evaluate_statistics import Estimate, accuracy, difference, mean_of_sets, pass_at_k
from train import load_rows, named_task
from trl_gmts.tasks import Task


@dataclass
class EvaluateArguments:
    task: str | None = field(default=None, metadata={"help": "'math', 'commonsense' or 'code'."})
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A model or a LoRA adapter, on the hub or in a folder."}
    )
    output_dir: str = field(default="out/eval", metadata={"help": "Where the answers and the results go."})
    benchmarks: list[str] | None = field(
        default=None,
        metadata={
            "help": "Names of the paper's sets, or local .jsonl, .json or .parquet files. Default: all of the task's."
        },
    )
    num_samples: int | None = field(
        default=None, metadata={"help": "Answers to each problem. Default: the paper's, 16 (code: 1)."}
    )
    temperature: float | None = field(
        default=None, metadata={"help": "0: greedy. Default: the paper's, 1.0 (code: 0)."}
    )
    top_p: float = field(default=1.0, metadata={"help": "Nucleus sampling; 1 switches it off."})
    max_completion_length: int = field(
        default=2048, metadata={"help": "Tokens of an answer, at most. Use the value the model was trained with."}
    )
    chat_template_kwargs: dict | str | None = field(
        default=None, metadata={"help": "For the chat template, as JSON: the value the model was trained with."}
    )
    seed: int = field(default=0, metadata={"help": "Of the sampling."})
    backend: Literal["vllm", "transformers"] = field(
        default="vllm", metadata={"help": "What generates: vLLM (a GPU), or transformers (slower, runs anywhere)."}
    )
    dtype: str = field(default="bfloat16", metadata={"help": "Of the weights: 'bfloat16', 'float32', ..."})
    batch_size: int | None = field(
        default=None,
        metadata={"help": "Problems between two saves, and at a time with transformers. Default: 8 (vLLM: 256)."},
    )
    limit: int | None = field(default=None, metadata={"help": "Only the first so many problems of each set."})
    tensor_parallel_size: int = field(default=1, metadata={"help": "vLLM: GPUs for one copy of the model."})
    gpu_memory_utilization: float = field(default=0.9, metadata={"help": "vLLM: share of the GPU's memory."})
    sandbox: Literal["bubblewrap", "rlimits"] = field(
        default="bubblewrap", metadata={"help": "Code: what holds the answers that are run; see docs/tasks.md."}
    )
    compare_to: str | None = field(
        default=None,
        metadata={"help": "The output_dir of another model on the same sets: adds the paired difference."},
    )

    def __post_init__(self) -> None:
        if isinstance(self.chat_template_kwargs, str):
            self.chat_template_kwargs = json.loads(self.chat_template_kwargs)
        greedy = self.task == "code"
        if self.num_samples is None:
            self.num_samples = 1 if greedy else 16
        if self.temperature is None:
            self.temperature = 0.0 if greedy else 1.0
        if self.batch_size is None:
            self.batch_size = 256 if self.backend == "vllm" else 8
        for name in ("num_samples", "batch_size", "max_completion_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, not {self.limit}. Leave it out for all problems.")
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, not {self.temperature}.")
        if self.temperature == 0 and self.num_samples > 1:
            raise ValueError(
                f"num_samples={self.num_samples} with temperature=0 asks for the same greedy answer again and again. "
                "Set num_samples to 1 or raise the temperature."
            )


@dataclass
class Answer:
    text: str
    num_tokens: int


# Prompts as token ids, and a seed -> `num_samples` answers to each prompt.
Generate = Callable[[list[list[int]], int], list[list[Answer]]]


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    # BigCodeBench's tests share the answer's process: good enough to measure with, not to train on.
    task = named_task(args.task, args.sandbox, same_process=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path, padding_side="left")
    examples = {
        name: load_examples(benchmark, task, args.limit) for name, benchmark in chosen_benchmarks(args).items()
    }
    prompts = {name: [prompt_ids(row["prompt"], tokenizer, args) for row in rows] for name, rows in examples.items()}
    longest = max(len(ids) for sets in prompts.values() for ids in sets)
    backend = vllm_backend if args.backend == "vllm" else transformers_backend
    generate = backend(args, tokenizer, longest)

    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    answers = {
        name: answer_problems(folder / f"{name}.answers.jsonl", rows, prompts[name], generate, task, args)
        for name, rows in examples.items()
    }
    results = summarize(args, answers)
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    (folder / "results.md").write_text(report(args, results))
    print(report(args, results))


def parse_arguments(arguments: list[str] | None = None) -> EvaluateArguments:
    parser = TrlParser(EvaluateArguments)
    (args,) = parser.parse_args_and_config(arguments)
    for name in ("task", "model_name_or_path"):
        if getattr(args, name) is None:
            parser.error(f"--{name} is missing: give it on the command line or in the --config file.")
    return args


# Problems


def chosen_benchmarks(args: EvaluateArguments) -> dict[str, Benchmark]:
    known = BENCHMARKS[args.task]
    chosen: dict[str, Benchmark] = {}
    for name in args.benchmarks or known:
        local = Path(name)
        key = name if name in known else local.stem
        if key in chosen:
            raise ValueError(f"Two of --benchmarks are called {key!r}: rename one of the files.")
        if name not in known and not local.suffix:
            raise ValueError(f"{name!r} is neither one of the sets of {args.task} ({', '.join(known)}) nor a file.")
        chosen[key] = known[name] if name in known else Benchmark(name, "train")
    return chosen


def load_examples(benchmark: Benchmark, task: Task, limit: int | None) -> list[dict[str, Any]]:
    """Each problem's prompt, and the columns that its score needs."""
    rows = load_rows(benchmark.dataset, benchmark.config, benchmark.split)
    if benchmark.months is not None:
        first, last = benchmark.months
        rows = rows.filter(lambda row: first <= str(row["contest_date"])[:7] <= last)
    return [task.example(row) for row in rows.select(range(min(limit or len(rows), len(rows))))]


def prompt_ids(prompt: Any, tokenizer: PreTrainedTokenizerBase, args: EvaluateArguments) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **(args.chat_template_kwargs or {})
    )["input_ids"]


# Generation


def transformers_backend(args: EvaluateArguments, tokenizer: PreTrainedTokenizerBase, longest: int) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # With peft installed this loads an adapter's base model too.
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=args.dtype).to(device).eval()
    stop = model.generation_config.eos_token_id
    stop = {tokenizer.eos_token_id, *(stop if isinstance(stop, list) else [stop])} - {None}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    sampling = (
        {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
        if args.temperature > 0
        else {"do_sample": False}
    )

    @torch.inference_mode()
    def generate(prompts: list[list[int]], seed: int) -> list[list[Answer]]:
        torch.manual_seed(seed)
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            num_return_sequences=args.num_samples,
            max_new_tokens=args.max_completion_length,
            eos_token_id=sorted(stop),
            pad_token_id=pad,
            **sampling,
        )
        answers = []
        for tokens in output[:, width:].tolist():
            end = next((i + 1 for i, token in enumerate(tokens) if token in stop), len(tokens))
            answers.append(Answer(tokenizer.decode(tokens[:end], skip_special_tokens=True), end))
        return [answers[i : i + args.num_samples] for i in range(0, len(answers), args.num_samples)]

    return generate


def vllm_backend(args: EvaluateArguments, tokenizer: PreTrainedTokenizerBase, longest: int) -> Generate:
    try:
        from vllm import LLM, SamplingParams
        from vllm.lora.request import LoRARequest
    except ImportError as error:
        raise ImportError(
            "--backend vllm needs vLLM: pip install 'trl-gmts[vllm]'. Without it, use --backend transformers."
        ) from error

    settings: dict[str, Any] = {
        "tokenizer": args.model_name_or_path,
        "dtype": args.dtype,
        "max_model_len": longest + args.max_completion_length,
        "tensor_parallel_size": args.tensor_parallel_size,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "seed": args.seed,
    }
    adapter = adapter_config(args.model_name_or_path)
    request = None
    if adapter is None:
        llm = LLM(args.model_name_or_path, **settings)
    else:
        llm = LLM(adapter["base_model_name_or_path"], enable_lora=True, max_lora_rank=adapter["r"], **settings)
        request = LoRARequest("adapter", 1, args.model_name_or_path)

    def generate(prompts: list[list[int]], seed: int) -> list[list[Answer]]:
        sampling = [
            SamplingParams(
                n=args.num_samples,
                temperature=args.temperature,
                top_p=args.top_p,
                max_tokens=args.max_completion_length,
                seed=seed + i,
            )
            for i in range(len(prompts))
        ]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, lora_request=request)
        return [[Answer(answer.text, len(answer.token_ids)) for answer in output.outputs] for output in outputs]

    return generate


def adapter_config(name: str) -> dict[str, Any] | None:
    """The configuration of a LoRA adapter in a local folder; None for a whole model."""
    path = Path(name) / "adapter_config.json"
    return json.loads(path.read_text()) if path.is_file() else None


# Answers, kept on disk


def answer_problems(
    path: Path,
    examples: list[dict[str, Any]],
    prompts: list[list[int]],
    generate: Generate,
    task: Task,
    args: EvaluateArguments,
) -> list[dict[str, Any]]:
    """Answers to the problems of a set, in order: those that the file already has, then new ones, saved by batches."""
    settings = {
        name: getattr(args, name)
        for name in (
            *("task", "model_name_or_path", "num_samples", "temperature", "top_p", "max_completion_length"),
            *("chat_template_kwargs", "seed", "backend", "dtype", "batch_size"),
        )
    }
    settings["weights"] = weights_of(args.model_name_or_path)
    answers = saved_answers(path, settings)
    # Batches are the same whether or not the run was interrupted, and so are their seeds: only whole ones are taken over.
    whole = len(answers) if len(answers) == len(examples) else len(answers) - len(answers) % args.batch_size
    answers = answers[:whole]
    changed = [a["index"] for a, example in zip(answers, examples, strict=False) if a["problem"] != digest(example)]
    if changed or len(answers) > len(examples):
        raise ValueError(f"{path} holds answers to other problems. Choose another --output_dir, or delete the file.")

    rewritten = path.with_suffix(".partial")
    rewritten.write_text("".join(json.dumps(line) + "\n" for line in [settings, *answers]))
    os.replace(rewritten, path)
    with path.open("a") as file:
        for start in range(len(answers), len(examples), args.batch_size):
            batch = examples[start : start + args.batch_size]
            written = generate(prompts[start : start + args.batch_size], args.seed + start)
            new = [
                {
                    "index": start + i,
                    "problem": digest(example),
                    "prompt": example["prompt"],
                    "answers": texts,
                    "num_tokens": lengths,
                    "scores": scores,
                }
                for i, (example, texts, lengths, scores) in enumerate(score(batch, written, task))
            ]
            file.write("".join(json.dumps(line) + "\n" for line in new))
            file.flush()
            os.fsync(file.fileno())
            answers += new
            print(f"{path.name}: {len(answers)} of {len(examples)} problems", flush=True)
    return answers


def digest(example: dict[str, Any]) -> str:
    """Of a problem with its key or tests, by which scores depend on it."""
    return hashlib.sha256(json.dumps(example, sort_keys=True).encode()).hexdigest()[:16]


def weights_of(model: str) -> list[list[Any]]:
    """Names, sizes and times of a local model's weights, which may be replaced under the same path. Empty for one on the hub."""
    files = sorted(path for path in Path(model).glob("*") if path.suffix in (".safetensors", ".bin"))
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def saved_answers(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]  # what follows the last newline was cut off while being written
    if not lines:
        return []
    try:
        header, *answers = map(json.loads, lines)
        complete = isinstance(header, dict) and all(
            {"index", "problem", "scores"} <= answer.keys() for answer in answers
        )
    except (json.JSONDecodeError, AttributeError):
        complete = False
    if not complete:
        raise ValueError(
            f"{path} is not a file of answers that this script wrote. Choose another --output_dir, or delete it."
        )
    different = [name for name in settings if header.get(name) != settings[name]]
    if different:
        raise ValueError(
            f"{path} was made with other settings ({', '.join(f'{n}: {header.get(n)!r}' for n in different)}). Choose "
            "another --output_dir, or delete the file."
        )
    return answers


def score(
    examples: list[dict[str, Any]], written: list[list[Answer]], task: Task
) -> list[tuple[dict[str, Any], list[str], list[int], list[float | None]]]:
    """Each example with its answers' texts, lengths and rewards, all scored in one call as in training."""
    flat = [(example, answer) for example, answers in zip(examples, written, strict=True) for answer in answers]
    completions = [
        answer.text if isinstance(example["prompt"], str) else [{"role": "assistant", "content": answer.text}]
        for example, answer in flat
    ]
    columns = {name: [example[name] for example, _ in flat] for name in examples[0] if name != "prompt"}
    scores = iter(task.reward(prompts=[example["prompt"] for example, _ in flat], completions=completions, **columns))
    return [
        (example, [a.text for a in answers], [a.num_tokens for a in answers], [next(scores) for _ in answers])
        for example, answers in zip(examples, written, strict=True)
    ]


# Results


def summarize(args: EvaluateArguments, answers: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    sets: dict[str, Any] = {}
    for name, problems in answers.items():
        # A problem whose key cannot be read has no score: it is left out, and the count says so.
        scored = [problem for problem in problems if None not in problem["scores"]]
        if not scored:
            raise ValueError(f"None of the problems of {name} could be scored: look at {name}.answers.jsonl.")
        correct = correctness(scored)
        lengths = [length for problem in problems for length in problem["num_tokens"]]
        sets[name] = {
            "problems": len(scored),
            "not_scored": len(problems) - len(scored),
            "accuracy": asdict(accuracy(correct)),
            "pass_at_k": {str(k): pass_at_k(correct, k) for k in powers_of_two(args.num_samples)},
            "mean_tokens": sum(lengths) / len(lengths),
            "at_length_limit": sum(length >= args.max_completion_length for length in lengths) / len(lengths),
        }
        if args.compare_to is not None:
            other = {problem["index"]: problem for problem in answers_of(args.compare_to, name)}
            if any(other.get(p["index"], {}).get("prompt") != p["prompt"] for p in scored):
                raise ValueError(f"{args.compare_to} does not hold answers to the same problems of {name}.")
            both = [p for p in scored if None not in other[p["index"]]["scores"]]
            theirs = correctness([other[p["index"]] for p in both])
            sets[name]["difference"] = asdict(difference(correctness(both), theirs))
    estimates = {name: Estimate(**result["accuracy"]) for name, result in sets.items()}
    return {
        "arguments": asdict(args),
        "sets": sets,
        "mean": asdict(mean_of_sets(list(estimates.values()))),
        "mean_over_the_papers_sets": {
            row.name: asdict(mean_of_sets([estimates[name] for name in row.sets]))
            for row in PAPER[args.task]
            if row.sets is not None and set(row.sets) <= set(estimates)
        },
    }


def correctness(problems: list[dict[str, Any]]) -> list[list[bool]]:
    return [[score >= 1 for score in problem["scores"]] for problem in problems]


def answers_of(folder: str, name: str) -> list[dict[str, Any]]:
    path = Path(folder) / f"{name}.answers.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"--compare_to: {path} does not exist.")
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... and the number itself."""
    return sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | {most})


def report(args: EvaluateArguments, results: dict[str, Any]) -> str:
    k = args.num_samples
    how = "greedy" if args.temperature == 0 else f"T = {args.temperature:g}"
    head = ["set", "problems", f"average@{k}", "95 % interval", f"pass@{k}", "cut off"]
    head += [f"against {args.compare_to}", "95 % interval"] if args.compare_to else []
    lines = [f"# {args.model_name_or_path}: {args.task}, in percent ({how})", "", *table_head(head)]
    for name, result in results["sets"].items():
        mean = result["accuracy"]
        cells = [name, str(result["problems"]), percent(mean["value"]), interval(mean)]
        cells += [percent(result["pass_at_k"][str(k)]), percent(result["at_length_limit"])]
        if args.compare_to:
            cells += [f"{100 * result['difference']['value']:+.2f}", interval(result["difference"], sign="+")]
        lines.append(table_row(cells))
    if len(results["sets"]) > 1:
        mean, blank = results["mean"], [""] * (len(head) - 4)
        lines.append(table_row(["**mean of the sets**", "", percent(mean["value"]), interval(mean), *blank]))
    lines += ["", "Intervals: Wilson, problems as the independent units (`evaluate_statistics.py`).", ""]

    lines += table_head(["the paper, mean of its sets", "base", "backbone", "+ ETS", "+ GMTS", "this run, same sets"])
    for row in PAPER[args.task]:
        ours = results["mean_over_the_papers_sets"].get(row.name)
        numbers = [f"{number:.2f}" for number in (row.base, row.backbone, row.ets, row.gmts)]
        lines.append(table_row([row.name, *numbers, "–" if ours is None else percent(ours["value"])]))
    lines += [
        "",
        "–: not all sets of the row were evaluated, or (code) the paper does not say which variants it averages.",
    ]
    return "\n".join(lines) + "\n"


def table_head(cells: list[str]) -> list[str]:
    return [table_row(cells), table_row(["---", *["--:"] * (len(cells) - 1)])]


def table_row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def percent(share: float) -> str:
    return f"{100 * share:.2f}"


def interval(estimate: dict[str, float], sign: str = "") -> str:
    return f"{100 * estimate['low']:{sign}.2f} to {100 * estimate['high']:{sign}.2f}"


if __name__ == "__main__":
    main()
