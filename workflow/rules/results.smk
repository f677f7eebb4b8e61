# The tables and figures of a study. If several studies are run together, each of them has these rules.
from functools import partial

from fedpipe.core.storage.layout import get_assignment_path

for PLAN in STUDY_DAG.plan.plans:
    FILES = PLAN.study_files
    SUFFIX = STUDY_DAG.get_rule_name_suffix(PLAN)

    rule:
        name:
            f"table{SUFFIX}"
        input:
            STUDY_DAG.get_input_after_search(
                PLAN, STUDY_DAG.get_table_input, checkpoints
            ),
        output:
            report(
                str(FILES.get_result_table_path("html")),
                caption="../report/table.rst",
                category="Results",
                labels={"shows": "table of accuracies"},
            ),
            [
                path
                for path in dag.get_table_output(PLAN)
                if path != str(FILES.get_result_table_path("html"))
            ],
        log:
            f"{FILES.path}/logs/table.log",
        localrule: True
        conda:
            CONDA
        params:
            study=str(PLAN.params),
            preset=PLAN.preset,
            fingerprint=PLAN.report_fingerprint,
            shared=PLAN.shared,  # the table notes runs from other code
        shell:
            "fedpipe table --params {params.study:q} --preset {params.preset} "
            "--plan-fingerprint {params.fingerprint} > {log:q} 2>&1"

    # Each figure is drawn from one of the merged files of all runs.
    for FIGURE, LABEL in PLAN.figure_labels.items():

        rule:
            name:
                f"{FIGURE}{SUFFIX}"
            input:
                STUDY_DAG.get_input_after_search(
                    PLAN, partial(dag.get_figure_input, name=FIGURE), checkpoints
                ),
            output:
                report(
                    f"{FILES.figures_folder}/{FIGURE}.svg",
                    caption=f"../report/{FIGURE.partition('_')[0]}.rst",
                    category="Results",
                    labels={"shows": LABEL},
                ),
                f"{FILES.figures_folder}/{FIGURE}.pdf",
                f"{FILES.figures_folder}/{FIGURE}.png",
            log:
                f"{FILES.path}/logs/{FIGURE}.log",
            localrule: True
            conda:
                CONDA
            params:
                figure=FIGURE,
                study=str(PLAN.params),
                preset=PLAN.preset,
                fingerprint=PLAN.report_fingerprint,
            shell:
                "fedpipe figure {params.figure} --params {params.study:q} --preset {params.preset} "
                "--plan-fingerprint {params.fingerprint} > {log:q} 2>&1"

    rule:
        name:
            f"partition_figure{SUFFIX}"
        input:
            dag.make_partition_wildcards_function(
                PLAN, lambda key: str(get_assignment_path(key))
            ),
        output:
            report(
                f"{FILES.get_partition_figure_path('{partition}')}.svg",
                caption="../report/partition.rst",
                category="Partitions",
                labels=dag.make_partition_wildcards_function(
                    PLAN, PLAN.build_partition_report_labels
                ),
            ),
            f"{FILES.get_partition_figure_path('{partition}')}.pdf",
            f"{FILES.get_partition_figure_path('{partition}')}.png",
        log:
            f"{FILES.path}/logs/partition-figure/{{partition}}.log",
        localrule: True
        conda:
            CONDA
        params:
            study=str(PLAN.params),
            preset=PLAN.preset,
            key=dag.make_partition_wildcards_function(PLAN, str),
            width=PLAN.report.figure_width,  # a change draws the figure again
            drift=str(PLAN.drift_notes),
            held_out=dag.make_partition_wildcards_function(
                PLAN, lambda key: str(PLAN.held_out.get(key, ()))
            ),
        shell:
            "fedpipe figure partition {params.key} --params {params.study:q} --preset {params.preset} > {log:q} 2>&1"
