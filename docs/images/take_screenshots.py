"""Takes the screenshots of docs in Chromium: a small study while it runs and when it is complete.

    python docs/images/take_screenshots.py            # writes the PNGs next to this file, in about three minutes
    python docs/images/take_screenshots.py FOLDER --rounds 2

The study runs in a temporary clone of the last commit, with a method that fails, so that you see its log.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from PIL import Image
from rich.console import Console
from snakemake.assets import Assets

from fedpipe.planning.plan import Plan
from fedpipe.report import status, status_table

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
COLORS = 96  #: colors of a PNG, so that it is small
WIDTH = 1280
METHODS = ("fedavg", "fedprox", "scaffold", "feddw", "fedala")
BROKEN = "sharp"  #: the method that fails
CLICK = """setInterval(() => {
  const links = [...document.querySelectorAll("a, button")];
  const row = [...document.querySelectorAll("tr")].find(one => one.textContent.includes("learning curves"));
  const link = row ? row.querySelector("a") : links.find(one => one.textContent.trim() === "Results");
  if (link && !document.querySelector(".h-screen.items-center img")) link.click();
  const content = document.querySelector(".h-screen.items-center");
  if (content) content.style.alignItems = "flex-start";
}, 100);"""  #: opens the learning curves in Snakemake's report, at the top instead of the middle
BROKEN_MODULE = '''"""A method with a mistake."""

from dataclasses import dataclass

from fedpipe.algorithms.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class Sharp(FedAvg):
    """FedAvg with a perturbed loss, and a mistake in a name."""

    radius: float = 0.05

    def loss(self, client, batch):
        return self.risk(client, batch) + self.radios * client["model"].square_norm()
'''


def write_study(project: Path, rounds: int, has_broken_method: bool) -> None:
    """Write params.yaml: five methods of the shipped study and optionally one that fails."""
    study = yaml.safe_load((ROOT / "params.yaml").read_text())
    study["federation"]["rounds"] = rounds
    study["algorithms"] = {name: study["algorithms"][name] for name in METHODS}
    if has_broken_method:
        study["algorithms"][BROKEN] = {"algorithm": "own.Sharp"}
        (project / "own.py").write_text(BROKEN_MODULE)
    study["study"]["algorithms"] = list(study["algorithms"])
    study.pop("presets", None)
    (project / "params.yaml").write_text(yaml.safe_dump(study, sort_keys=False))


def take_screenshot(page: Path, image: Path, height: int, width: int = WIDTH) -> None:
    """Take a screenshot of a page, after its scripts have run."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not browser:
        raise SystemExit("Chromium is not installed. Install the package `chromium`.")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        # The window is higher than the page in it, and a page paints only its visible part.
        options += [f"--window-size={width},{height + 300}", "--virtual-time-budget=10000", f"--screenshot={image}"]
        options += ["--no-sandbox"] if os.geteuid() == 0 else []
        subprocess.run([browser, *options, page.resolve().as_uri()], check=True, capture_output=True, timeout=120)
    picture = Image.open(image).convert("RGB").crop((0, 0, width, height))
    picture.quantize(COLORS, dither=Image.Dither.NONE).save(image, optimize=True)


def include_vega(page: Path) -> None:
    """Replace the links of DVC's page to Vega by Snakemake's copies of its libraries, so that it needs no network."""
    text = page.read_text(encoding="utf-8")
    for name in ("vega", "vega-lite", "vega-embed"):
        script = f"<script>{Assets.get_content(f'{name}/{name}.js')}</script>"
        link = rf'<script src="https://cdn.jsdelivr.net/npm/{name}@[^"]*"></script>'
        text, count = re.subn(link, lambda _, script=script: script, text)
        if count != 1:
            raise SystemExit(f"{page} has {count} links to {name} instead of one.")
    page.write_text(text, encoding="utf-8")


def take_terminal_screenshot(plan: Plan, folder: Path, image: Path) -> None:
    """Take a screenshot of `fedpipe status --watch` in a terminal of 80 x 24 characters."""
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True)
    console.print(
        status_table.render_progress_table(plan, *status.load_progress_and_failures(plan), width=80, height=24)
    )
    svg = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="fedpipe status --watch"), flags=re.DOTALL)
    page = folder / "terminal.html"  # without the fonts, which would be downloaded
    page.write_text(f"<!doctype html><style>body {{ margin: 0 }} svg {{ display: block }}</style>{svg}")
    view_width, view_height = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0])
    take_screenshot(page, image, round(view_height), round(view_width))


def take_screenshots(folder: Path, rounds: int) -> None:
    """Run the study in a temporary clone, and write all PNGs to a folder."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        project = Path(name) / "study"
        run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(project)])
        os.chdir(project)
        write_study(project, rounds, has_broken_method=True)
        command = [sys.executable, "-m", "fedpipe", "run", "-j", "2", "--keep-going", "--quiet", "all"]
        run([sys.executable, "-m", "fedpipe", "plan"])
        plan = Plan.read(Path("results/plan.json"))
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None:
                runs, failures = status.load_progress_and_failures(plan)
                if failures and sum(one.rounds for one in runs) > 0.6 * rounds * len(METHODS) * len(plan.seeds):
                    break
                time.sleep(0.2)
            take_terminal_screenshot(plan, Path(name), folder / "status-terminal.png")
            run([sys.executable, "-m", "fedpipe", "status", "--html", "status.html"])
            take_screenshot(Path("status.html"), folder / "status-page.png", 1120)
        write_study(project, rounds, has_broken_method=False)
        run([sys.executable, "-m", "fedpipe", "run", "-j", "2", "--quiet", "all"])
        run(["snakemake", "--report", "report.html"])
        with Path("report.html").open("a", encoding="utf-8") as report:
            report.write(f"<script>{CLICK}</script>")
        take_screenshot(Path("report.html"), folder / "snakemake-report.png", 360)
        run(["dvc", "plots", "show", "-o", "dvc_plots"])
        include_vega(Path("dvc_plots/index.html"))
        take_screenshot(Path("dvc_plots/index.html"), folder / "dvc-plots.png", 900, 940)
        paper = (ROOT / "docs/papers/reduced/feddw.html").read_text(encoding="utf-8")
        Path("paper.html").write_text(f"{paper}<style>main > :has(~ #table-i) {{ display: none }}</style>")
        take_screenshot(Path("paper.html"), folder / "papers-page.png", 760)


def run(command: list[str]) -> None:
    """Run a command of this environment, and print its output if it fails."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="Folder of the PNGs.")
    parser.add_argument("--rounds", type=int, default=30, help="Rounds of the study.")
    arguments = parser.parse_args()
    take_screenshots(arguments.folder.resolve(), arguments.rounds)
