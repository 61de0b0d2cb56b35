"""Update the generated blocks of README.md and of the pages in docs/.

    python -m lab.readme

A block is delimited by `<!-- NAME -->` and `<!-- /NAME -->`, or by `<!-- NAME ARGUMENT -->` and
`<!-- /NAME -->`. A test fails if a block is out of date.
"""

import json
import re
from functools import partial

from check.advice import ADVICE
from check.report import ORDER
from lab.bench import draws as bench_draws
from lab.bench import operations as bench_operations
from lab.bench import peers as bench_peers
from lab.bench import split as bench_split
from lab.bench import watching as bench_watching
from lab.bench.report import HEAD, table_rows
from lab.budgets import RESULT as BUDGETS
from lab.budgets import compiled_table
from lab.budgets import peers_table as null_peers_table
from lab.budgets import table as budgets_table
from lab.chaos import log as chaos_log
from lab.communication import RESULT as COMMUNICATION
from lab.communication import table as communication_table
from lab.edits import refused_table
from lab.edits import table as edits_table
from lab.fit import __main__ as lab_fit
from lab.guarantees import RESULT as GUARANTEES
from lab.guarantees import table as guarantees_table
from lab.memory import table as memory
from lab.mixtures import RESULT as MIXTURES
from tools.copy import TASKS, options_and_commands
from tools.lib.closure import purpose, size, size_of, total
from tools.lib.ladder import LADDER, RESULTS, ROOT, RUNGS, changed, lesson
from tools.lib.markdown import anchor, markdown_table
from tools.lib.prune import GUARDS, without
from tools.verify import table as verify_table
from tools.verify.cases import FLOAT64, SUITES
from tools.verify.plants import BUGS

PROVEN = {
    "images": "ResNet and ViT, accuracy",
    "text": "GPT with tied embeddings, perplexity",
    "moe": "GPT with experts, perplexity",
    "segmentation": "U-Net, mean IoU",
    "diffusion": "DiT, loss over random noise",
}


def ladder():
    """The table of the rungs."""
    rows = []
    for rung in LADDER:
        parent = f"`{rung.parent}`" if rung.parent else ""
        count = str(changed(rung)) if rung.parent else ""
        rows.append([f"[`{rung.script}`](../{rung.script})", parent, rung.adds, count])
    return markdown_table(["script", "builds on", "adds", "changed lines"], rows)


def loaded_by(script):
    """The files that a run of a script by its default command loads."""
    names = json.loads((RESULTS / "loaded.json").read_text(encoding="utf-8"))[script]
    return [ROOT / name for name in names]


def lesson_block(script):
    """The whole diff from a rung's parent to the rung."""
    lines = ["@@" if line.startswith("@@") else line for line in lesson(RUNGS[script])]
    return "\n".join(["```diff", *lines, "```"])


def loaded_block():
    """What a run of each script by its default command loads, in hundreds."""
    rows = []
    for script in RUNGS:
        files = loaded_by(script)
        lines, tokens = (round(number, -2) for number in total(files))
        texts = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in files}
        texts = without(texts, GUARDS).values()
        plain = round(sum(size_of(text.decode()).lines for text in texts), -2)
        counts = size(ROOT / script).lines, len(files) - 1, lines, plain, tokens
        rows.append([f"`{script}`", *(f"{count:,}" for count in counts)])
    head = [
        "script",
        "its own code lines",
        "modules",
        "code lines with them",
        "`--plain`",
        "tokens",
    ]
    return markdown_table(head, rows)


def purpose_without_setting(path):
    """The first line of a module's docstring, without the setting in front of it."""
    text = re.sub(r"^(?:--|dataset=).*?: ", "", purpose(path))
    return text[0].upper() + text[1:]


def options_block():
    """The modules that only a setting, or a function of a task, needs."""
    by_path = {}
    for task in TASKS:
        for rung in LADDER:
            found = options_and_commands(ROOT / rung.script, task).values()
            by_path |= {option.path: option for option in found}
    rows = [
        [
            f"`{option.path.relative_to(ROOT)}`",
            f"`{option.setting}`",
            purpose_without_setting(option.path),
            str(size(option.path).lines),
        ]
        for option in sorted(by_path.values())
    ]
    return markdown_table(["file", "needed by", "purpose", "code lines"], rows)


def guards_block():
    """What a copy can be without."""
    rows = [
        [f"`{name}`", guard.purpose, str(size(ROOT / guard.path).lines)]
        for name, guard in GUARDS.items()
    ]
    return markdown_table(["name", "what it does", "code lines"], rows)


def proof():
    """What `make verify` showed for each task, in a line."""
    rows = []
    for task, suite in SUITES.items():
        is_exact = {case.name: case.tolerance == FLOAT64 for case in suite.cases if case.reference}
        exact = [row for row in verified(task)["rows"] if is_exact.get(row["case"])]
        differences = (
            f"{max(row[name] for row in exact):.0e}"
            for name in ("loss_difference", "weight_difference")
        )
        rows.append([task, PROVEN[task], str(len(exact)), *differences])
    head = ["task", "model and metric", "runs compared", "largest difference: loss", "weight"]
    return markdown_table(head, rows)


def verified(task):
    """The published results of `make verify` for a task."""
    name = "verify.json" if task == "images" else f"verify-{task}.json"
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def verify(task="images"):
    """What `make verify` showed for a task, with all rows for images, and what has no row."""
    result = verified(task)
    lines = [f"No rows for {what}: {why}." for what, why in result.get("left_out", {}).items()]
    failed = [row["case"] for row in result["rows"] if row["problem"]]
    if failed:
        raise ValueError(f"docs/proof.md says that all rows pass, but {failed} did not")
    if task != "images":
        page = f"[{len(result['rows'])} rows](../lab/results/verify-{task}.md), all of which pass."
        return " ".join([page, *lines])
    head = verify_table.head_of(SUITES[task].best[0])
    table = _columns(head[:5], head, [*map(verify_table.cells_of, result["rows"])])
    return "\n\n".join([table, " ".join(lines)])


def _columns(names, head, rows):
    numbers = [head.index(name) for name in names]
    return markdown_table(names, [[row[i] for i in numbers] for row in rows])


def bench():
    """The table of `make bench`, without the parts of the steps."""
    result = json.loads((RESULTS / "bench.json").read_text(encoding="utf-8"))
    names = [*HEAD[:5], "of limit", "limited by"]
    return _columns(names, HEAD, table_rows(result))


def peers():
    """The rows of these scripts and of the published tutorial in `make bench-peers`."""
    result = json.loads((RESULTS / "peers.json").read_text(encoding="utf-8"))
    head = bench_peers.HEAD
    names = [name for name in head if name not in ("workers", head[3])]
    facts = result["contestants"].values()
    rows = zip(facts, bench_peers.table_rows(result), strict=True)
    kept = [row for fact, row in rows if fact["kind"] != "peer" or fact["workers"].endswith("!")]
    return _columns(names, head, kept)


def operations():
    """The table of `make bench-operations`."""
    result = json.loads((RESULTS / "operations.json").read_text(encoding="utf-8"))
    return markdown_table(bench_operations.HEAD, bench_operations.table_rows(result))


BEYOND = {
    "settings from YAML and flags, with an error for each mistake": ("config",),
    "any batch: dicts, masks, plain numbers; your task is one import": ("batches", "contract"),
    "any dataset, and those that make whole batches": ("data",),
    "metrics that are not means, the best epoch, `metrics.jsonl`": ("metrics",),
    "checkpoints written while training goes on, kept, and skipped if damaged; any script resumes "
    "the run of any other": ("checkpoint",),
    "the same bits after a resume: dropout, DDP's order of summation": ("seeds", "distributed"),
    "saves every few minutes and on signals, with an exit code that schedulers know": (
        "guards/preemption",
        "signals",
    ),
    "the ranks compare their weights and optimizer state, bit for bit, before each save": (
        "guards/replicas",
    ),
    "one error for all ranks, as the last line": ("errors", "reports"),
    "BatchNorm over all ranks, on CPUs too": ("sync_batchnorm",),
    "the last good checkpoint is kept, one run at a time in a folder, where a rank hangs, and the "
    "time left": ("guards/finite", "guards/lock", "guards/hang", "guards/progress"),
}


def beyond():
    """What the ladder's scripts do beyond the scripts of one_file/, and its price in lines."""
    rows = []
    for what, modules in BEYOND.items():
        paths = [ROOT / "utils" / f"{module}.py" for module in modules]
        names = ", ".join(f"`{path.relative_to(ROOT)}`" for path in paths)
        rows.append([what, names, str(sum(size(path).lines for path in paths))])
    return markdown_table(["what", "where", "lines"], rows)


def draws():
    """What random numbers by sample cost."""
    return bench_draws.table(_drawn()["costs"])


def unkeyed():
    """What no random numbers by sample can make the same."""
    return bench_draws.unkeyed(_drawn())


def _drawn():
    return json.loads((RESULTS / "draws.json").read_text(encoding="utf-8"))


def watching():
    """The table of `make bench-watching`."""
    result = json.loads((RESULTS / "watching.json").read_text(encoding="utf-8"))
    return f"{bench_watching.table(result)}\n\n{bench_watching.notes(result)}"


def split():
    """The table of `make bench-split`."""
    rows = json.loads((RESULTS / "split.json").read_text(encoding="utf-8"))["rows"]
    cells = [bench_split.cells(row["script"], row["flags"], row) for row in rows]
    return markdown_table(bench_split.HEAD, cells)


def guarantees(path=GUARANTEES):
    """The table of lab.guarantees, or of lab.mixtures, and the versions."""
    result = json.loads(path.read_text(encoding="utf-8"))
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{guarantees_table(result['readers'])}\n\nMeasured with {versions}."


def budgets():
    """The counts of lab.budgets, and the version of PyTorch."""
    result = json.loads(BUDGETS.read_text(encoding="utf-8"))
    return f"{budgets_table(result)}\n\nCounted on the null device, with torch {result['torch']}."


def fused():
    """The kernels of lab.budgets with torch.compile."""
    return compiled_table(json.loads(BUDGETS.read_text(encoding="utf-8")))


def null_peers():
    """The counts of what others launch on the null device."""
    return null_peers_table(json.loads(BUDGETS.read_text(encoding="utf-8")))


def fit():
    """What tools.fit says of a model that others have measured."""
    result = json.loads(lab_fit.RESULT.read_text(encoding="utf-8"))
    return f"{lab_fit.comparison(result)}\n\nWith torch {result['torch']}."


def fitting():
    """What tools.fit says of the GPTs of lab.fit."""
    result = json.loads(lab_fit.RESULT.read_text(encoding="utf-8"))
    return "\n\n".join(lab_fit.ways(result, name) for name in lab_fit.MODELS)


def chaos():
    """What `make chaos` did to each script."""
    return chaos_log.report(json.loads(chaos_log.RESULT.read_text(encoding="utf-8")))


def symptoms():
    """What is seen of each bug that can be planted, and the section about it."""
    rows = [[bug.symptom, f"[{bug.name}](#{anchor(bug.name)})"] for bug in BUGS]
    return markdown_table(["symptom", "trap"], rows)


def traps():
    """One entry per bug that can be planted."""
    return "\n\n".join(
        f"## {bug.name}\n\n{bug.effect}\n\n"
        f"- **Prevention**: {bug.prevention}\n"
        f"- **Caught by** {_row(bug)}.\n\n"
        f"```diff\n# {bug.file}\n{bug.diff()}\n```"
        for bug in BUGS
    )


def recipes():
    """The questions that the pages of docs/recipes answer, which are their titles."""
    rows = []
    for page in sorted((ROOT / "docs" / "recipes").glob("[a-z]*.md")):
        question = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        rows.append(f"- [{question}](recipes/{page.name})")
    return "\n".join(rows)


def rules():
    """What the check reports, by severity."""
    rows = []
    for severity in ORDER:
        for rule, advice in ADVICE.items():
            if advice.severity == severity:
                rows.append([f"`{rule}`", severity, advice.why])
    return markdown_table(["rule", "", "why it matters"], rows)


def _row(bug):
    return f"`{bug.row}`" + (f" (`--task {bug.task}`)" if bug.task != "images" else "")


def communication(task):
    """What the scripts hand to collectives with a task."""
    result = json.loads(COMMUNICATION.read_text(encoding="utf-8"))
    rows = [row for row in result["rows"] if row["task"] == task]
    return communication_table({"rows": rows})


BLOCKS = {
    "ladder": ladder,
    "lesson": lesson_block,
    "loaded": loaded_block,
    "options": options_block,
    "guards": guards_block,
    "proof": proof,
    "verify": verify,
    "bench": bench,
    "peers": peers,
    "operations": operations,
    "draws": draws,
    "unkeyed": unkeyed,
    "watching": watching,
    "beyond": beyond,
    "symptoms": symptoms,
    "traps": traps,
    "recipes": recipes,
    "rules": rules,
    "memory": memory,
    "communication": communication,
    "split": split,
    "guarantees": guarantees,
    "edits": edits_table,
    "refused": refused_table,
    "mixtures": partial(guarantees, MIXTURES),
    "chaos": chaos,
    "budgets": budgets,
    "fused": fused,
    "null_peers": null_peers,
    "fit": fit,
    "fitting": fitting,
}
BLOCK = re.compile(r"(<!-- (\w+)(?: (\S+))? -->\n).*?(<!-- /\2(?: \S+)? -->)", re.DOTALL)


def pages():
    """README.md and the pages of docs/."""
    docs = ROOT / "docs"
    return [ROOT / "README.md", *sorted(docs.glob("*.md")), *sorted(RESULTS.glob("*.md"))]


def blocks_of(text):
    """(name, argument or None) of each block of a page."""
    return [(name, argument or None) for _, name, argument, _ in BLOCK.findall(text)]


def generate(text):
    """A page's text with every block up to date. KeyError for an unknown block."""

    def block(match):
        opening, name, argument, closing = match.groups()
        content = BLOCKS[name](*([argument] if argument else []))
        return f"{opening}{content}\n{closing}"

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    for page in pages():
        page.write_text(generate(page.read_text(encoding="utf-8")), encoding="utf-8")
