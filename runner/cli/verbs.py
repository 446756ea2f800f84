"""The verbs of the command line, one row each: their words and options, and facts that the program needs.

Each verb is implemented in a file of its name in `runner/verbs/`. It is imported only when it runs, so that verbs
without torch do not wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from runner.cli.nearest import nearest
from runner.cli.verb import Option, Verb

WATCHING = ("checkpoint_saver", "crash_bundle", "learning_curves", "progress_bar", "console_summary")
"""Callbacks that only record or display; batches are retrained without them."""
_TRUST = (
    Option("allow-targets", list, (), "classes outside this project that someone else's run may use"),
    Option("allow-code", bool, False, "imports the modules in code/ of someone else's run"),
    Option("allow-addresses", list, (), "addresses, and paths outside its folder, that someone else's run may use"),
)
_CHANGES = (
    Option("allow-changes", list, (), "keys or sections that may change even if they affect training"),
)  # fmt: skip
_TRAINS = (
    Option("allow-divergence", bool, False, "accepts a last loss or objective that is NaN or infinite; no exit code 3"),
)  # fmt: skip
_SWEEP = (
    Option("afresh", bool, False, "trains a new sweep, even if the same one was trained before"),
    Option("revive", list, (), "pruned jobs of the sweep to continue: all, or their names"),
)
_FOREIGN = (
    Option("better", ("auto", "lower", "higher"), "auto", "which values of the metric are better"),
    Option("seed-column", str, "", "the column of the seed in results from elsewhere, if it has another name"),
    Option("setting-column", list, (), "the columns of the setting in results from elsewhere"),
)
_MANY = "Many runs"
_BEFORE = "Before training"
_AGAIN = "Time travel"

_ROWS = (
    Verb(
        "train",
        help="trains; the default, so the word may be left out",
        example="runner model=mlp optimizer.lr=0.05",
        group="Verbs",
        options=(*_TRAINS, *_SWEEP),
        folder="run",
        on_all_ranks=True,
        trains=True,
        has_objective=True,
        can_be_swept=True,
    ),
    Verb(
        "resume",
        help="continues a run, in its own folder",
        example="runner resume latest trainer.max_duration=20ep",
        group="Verbs",
        words="RUN",
        options=(*_TRAINS, *_CHANGES, *_TRUST),
        uses_run="resume",
        folder="run",
        on_all_ranks=True,
        trains=True,
        has_objective=True,
    ),
    Verb(
        "eval",
        help="evaluates a run's weights",
        example="runner eval latest",
        group="Verbs",
        words="[RUN]",
        options=_TRUST,
        uses_run="resume",
        folder="run",
        on_all_ranks=True,
        uses_weights=True,
        has_objective=True,
        can_be_swept=True,
    ),
    Verb(
        "runs",
        help="lists the runs in outputs/, filtered and sorted",
        example="runner runs 'eval/loss<0.2' model=resnet8",
        group="Verbs",
        words="[CONDITION...]",
        options=(
            Option("sort", str, "", "a metric, key or field to sort by, with - in front for the largest first"),
            Option("format", ("table", "csv"), "table", "format of the list"),
            Option("limit", int, None, "number of runs to list; 0: all (default: 25 in a table, otherwise all)"),
        ),
        composes=False,
    ),
    Verb(
        "compare",
        help="shows runs side by side, and finds the batch where they diverge",
        example="runner compare RUN_A RUN_B",
        group="Verbs",
        words="RUN RUN...",
        needs_experiment=False,
    ),
    Verb(
        "check",
        help="tries out an experiment without its data, and trains nothing",
        example="runner check experiment=stdlib_lm_plain",
        group="Verbs",
        words="[RUN]",
        options=(*_CHANGES, *_TRUST),
        uses_run="resume",
        can_be_swept=True,
    ),
    Verb(
        "explain",
        help="lists what runs at which event, in which order and why",
        example="runner explain '+algorithms=[mixup,ema]'",
        group=_BEFORE,
        words="[RUN]",
        options=(*_CHANGES, *_TRUST),
        uses_run="resume",
        can_be_swept=True,
    ),
    Verb(
        "lr-range",
        help="increases the learning rate in a short trial, and suggests one",
        example="runner lr-range model=mlp",
        group=_BEFORE,
        words="[RUN]",
        options=(
            Option("start", float, 1e-5, "learning rate of the first batch, as optimizer.lr"),
            Option("end", float, 10.0, "learning rate of the last batch"),
            Option("batches", int, 100, "batches to train, at least 20"),
            Option("picture", str, "lr_range.png", "file for the picture: .png, .svg or .pdf"),
            *_TRUST,
        ),
        uses_run="rerun",
        on_all_ranks=True,
        imports_kept_code=True,
    ),
    Verb(
        "prove",
        help="kills a run at random moments, and checks that it resumes exactly",
        example="runner prove --kills 3",
        group=_BEFORE,
        words="[RUN]",
        options=(
            Option("batches", int, 40, "batches to train"),
            Option("kills", int, 5, "number of kills, during start-up, training, the end of an epoch, or a save"),
            Option("seed", int, 0, "seed for the moments of the kills"),
            Option("save-interval", str, "5ba", "time between checkpoints, such as 5ba"),
            Option("patience", int, 600, "seconds without a new batch after which a run counts as hung"),
            Option(
                "without",
                list,
                ("mlflow_logger", "crash_bundle", "learning_curves", "progress_bar", "console_summary"),
                "callbacks to omit; they only record or display",
            ),
            Option("keep", bool, False, "keeps the runs even if they are equal; if they differ, they are always kept"),
            *_TRUST,
        ),
        uses_run="rerun",
        folder="work",
        imports_kept_code=True,
    ),
    Verb(
        "fork",
        help="begins a new run from any moment of an old one",
        example="runner fork latest ba1200 optimizer.lr=0.01",
        group=_AGAIN,
        words="RUN BATCH",
        options=(*_TRAINS, *_TRUST, *_SWEEP),
        uses_run="fork",
        folder="run",
        on_all_ranks=True,
        trains=True,
        has_objective=True,
        can_be_swept=True,
    ),
    Verb(
        "rerun",
        help="trains the same experiment again, from its record",
        example="runner rerun latest seed=1",
        group=_AGAIN,
        words="RUN",
        options=(*_TRAINS, *_TRUST, *_SWEEP),
        uses_run="rerun",
        folder="run",
        on_all_ranks=True,
        trains=True,
        imports_kept_code=True,
        has_objective=True,
        can_be_swept=True,
    ),
    Verb(
        "replay",
        help="retrains one batch of a run, and shows what happened in it",
        example="runner replay RUN 1234",
        group=_AGAIN,
        words="RUN [BATCH]",
        options=(
            Option("worst", int, 8, "samples with the highest loss to show"),
            Option("picture", str, "worst.png", "file for their pictures: .png, .svg or .pdf; '' for none"),
            Option("to", str, "", "file for the batch, the outputs and the gradients, .safetensors"),
            Option("debug", bool, False, "stops in the debugger (pdb) before the forward pass"),
            Option(
                "without",
                list,
                WATCHING,
                "callbacks to omit, which record or display",
            ),
            *_TRUST,
        ),
        uses_run="retrain",
        on_all_ranks=True,
        imports_kept_code=True,
    ),
    Verb(
        "verify",
        help="retrains batches of a run, and compares digests",
        example="runner verify RUN",
        group=_AGAIN,
        words="RUN",
        options=(
            Option("batch", int, 1, "first batch to retrain, from 1"),
            Option("batches", int, 50, "number of batches to retrain"),
            Option("tolerance", float, 0.0, "relative difference up to which values count as equal; 0 compares bits"),
            Option("pin", str, "", "file to write that others can verify, such as tests/pinned.yaml"),
            *_TRUST,
        ),
        uses_run="retrain",
        on_all_ranks=True,
        judges=True,
    ),
    Verb(
        "verdict",
        help="tells whether B is better than A, or how many seeds to add",
        example="runner verdict experiment=digits_plain experiment=digits_fast",
        group=_MANY,
        words="RUNS [RUNS...]",
        options=(
            Option("metric", str, "", "a metric other than the objective"),
            Option(
                "budget", ("same", "any"), "same", "any: also compares runs that were trained for different lengths"
            ),
            *_FOREIGN,
        ),
        composes=False,
        judges=True,
    ),
    Verb(
        "decide",
        help="trains settings with more and more seeds, until one is better",
        example="runner decide optimizer.lr=0.1,0.2 trainer.max_duration=2ep",
        group=_MANY,
        words="[SETTING...]",
        options=(
            Option("margin", float, None, "differences of the objective up to this count as none"),
            Option("best", bool, False, "finds the best of all, instead of comparing each with the first"),
            Option("max-seeds", int, 30, "seeds after which it ends undecided, at least 6"),
            Option("budget", str, "", "time after which no seed is started, such as 2h"),
            Option("campaign", str, "", "name of a campaign, with one error budget for many decisions"),
            *_TRAINS,
            *_SWEEP,
        ),
        folder="run",
        on_all_ranks=True,
        trains=True,
        has_objective=True,
        can_be_swept=True,
    ),
    Verb(
        "table",
        help="writes a table of means over seeds, for a paper",
        example="runner table data=digits --rows experiment",
        group=_MANY,
        words="[RUNS...]",
        options=(
            Option("rows", list, (), "keys or groups of the rows, such as model,optimizer.lr"),
            Option("columns", list, (), "keys or groups of the columns"),
            Option("metric", str, "", "a metric other than the objective"),
            Option("format", ("markdown", "latex", "csv"), "markdown", "format of the table"),
            *_FOREIGN,
        ),
        composes=False,
    ),
    Verb(
        "predict",
        help="writes a run's predictions to a file",
        example="runner predict latest --format pt",
        words="[RUN]",
        options=(
            Option("data", str, "", "a file or folder of new rows without labels, instead of the run's own data"),
            Option(
                "format",
                ("parquet", "csv", "jsonl", "pt"),
                "parquet",
                "the form of the file: parquet, csv, jsonl, or pt for torch.load",
            ),
            Option("split", ("eval", "train", "test"), "eval", "data to predict"),
            *_TRUST,
        ),
        uses_run="resume",
        folder="run",
        on_all_ranks=True,
        uses_weights=True,
        can_be_swept=True,
    ),
    Verb(
        "export",
        help="writes the weights of a run to a file or a folder",
        example="runner export RUN model.pt",
        words="RUN FILE",
        options=(
            Option(
                "form",
                ("merged", "adapter"),
                "merged",
                "in a folder: adapters merged into the model, or alone for peft",
            ),
            Option("dtype", ("float32", "bfloat16", "float16"), "float32", "in a folder: the type of the weights"),
            Option("tokenizer", str, "", "in a folder: a model whose tokenizer is written too"),
            Option("base", str, "", "folder or model with the frozen weights that the run left out, if it has moved"),
        ),
        composes=False,
    ),
    Verb(
        "sync",
        help="sends MLflow what it missed while it was unreachable",
        example="runner sync",
        words="[RUN]",
        options=_TRUST,
        uses_run="resume",
        needs_experiment=False,
    ),
    Verb(
        "init",
        help="creates a new, working project",
        example="runner init my_project",
        words="FOLDER",
        composes=False,
    ),
    Verb(
        "list",
        help="lists the choices of config groups",
        example="runner list callbacks",
        words="[GROUP]",
        composes=False,
    ),
    Verb(
        "help",
        help="explains a choice, a key, a class or a verb",
        example="runner help early_stopper",
        words="[NAME]",
        composes=False,
    ),
    Verb(
        "completion",
        help="prints the completion script of a shell",
        example="runner completion bash >> ~/.bashrc",
        words="SHELL",
        composes=False,
    ),
)

VERBS: Mapping[str, Verb] = {verb.name: verb for verb in _ROWS}
"""All verbs by name, in the order in which they are listed for users."""

TRAINING = tuple(verb.name for verb in _ROWS if verb.trains)
"""Names of the verbs that train, whose runs can be resumed."""


def find_verb(name: str) -> Verb:
    """Return the verb of a name.

    Raises:
        ValueError: there is no such verb.
    """
    if name not in VERBS:
        raise ValueError(f"{name}: no such verb; " + nearest(name, VERBS))
    return VERBS[name]
