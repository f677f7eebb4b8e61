"""docs/tutorial.md in order, on digits: the study file, its commands, and the custom method."""

import re

import pytest
import yaml

from tests.pipeline.conftest import Project, count_jobs

pytestmark = pytest.mark.slow


def test_tutorial_page_runs_in_order(project: Project) -> None:
    page = (project.folder / "docs/tutorial.md").read_text()
    study, more = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, flags=re.S))
    code, addition = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    commands = [line for text in re.findall(r"```sh\n(.*?)```", page, flags=re.S) for line in text.splitlines()]
    assert commands[0].startswith("fedpipe plan --dry-run")
    path = project.folder / "studies/fashion.yaml"

    path.write_text(yaml.safe_dump(study))
    planned = project.run(*commands[0].split()).splitlines()
    assert [line.split()[0] for line in planned] == ["fedavg", "fedavg", "fedper", "fedper"], (
        "the plan of the study on the page"
    )

    small = study | {"dataset": {"name": "digits"}, "model": {"name": "mlp"}}  # other settings as on the page
    small["transforms"] = {}
    small["federation"] = study["federation"] | {"rounds": 4}
    path.write_text(yaml.safe_dump(small))
    output: dict[str, list[str]] = {}
    for command in commands:
        if command.startswith("fedpipe check"):
            (project.folder / "own.py").write_text(code)
            message = project.run(*command.split(), check=False)
            (sentence,) = re.findall(r"^    (own\.Ditto: .*)$", page, flags=re.M)
            assert message == f"{sentence}\n"
            (project.folder / "own.py").write_text(code.replace("    def keep(", f"{addition}\n    def keep("))
            assert project.run(*command.split()) == "own.Ditto passes all checks.\n"
            path.write_text(
                yaml.safe_dump(small | {"algorithms": more["algorithms"], "study": small["study"] | more["study"]})
            )
        else:
            output.setdefault(command, []).append(project.run(*command.split()))
    first, second = (count_jobs(printed)["segment"] for printed in output["fedpipe run --params studies/fashion.yaml"])
    assert (first, second) == (4, 2), "only the new method trains"
    table = output["fedpipe show --params studies/fashion.yaml"][1]
    rows = {row.split("|")[1].strip(): row.split("|")[2:4] for row in table.splitlines() if row.startswith("|")}
    assert rows["my_ditto"][1] == rows["FedAvg"][1], "Ditto has the global model of FedAvg"
    assert rows["FedPer"][1].strip() == "–"
