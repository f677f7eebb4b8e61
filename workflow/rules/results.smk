# The tables and figures of a study; of several that are made together, rules of the same make for each.
for STUDY_PLAN in WORK.plans:
    STUDY_FILES = STUDY_PLAN.study_files
    STUDY_RULE = "_" + re.sub(r"\W", "_", str(STUDY_FILES.path)) if TOGETHER else ""

    rule:
        name:
            f"table{STUDY_RULE}"
        input:
            collected(
                STUDY_PLAN,
                "metrics.parquet",
                "matrices.parquet",
                "rounds.parquet",
                "joined.json",
                "times.json",
            ),
            expand(
                "results/partitions/{key}/{name}.parquet",
                key=STUDY_PLAN.partitions,
                name=["assignment", "heterogeneity"],
            ),
        output:
            f"{STUDY_FILES.tables}/results.csv",
            f"{STUDY_FILES.tables}/results.md",
            report(
                f"{STUDY_FILES.tables}/results.html",
                caption="../report/table.rst",
                category="Results",
                labels={"shows": "table of accuracies"},
            ),
            f"{STUDY_FILES.tables}/statistics.csv",
            f"{STUDY_FILES.tables}/times.csv",
            f"{STUDY_FILES.metrics}",
            f"{STUDY_FILES.plots}/curves.csv",
            [
                f"{STUDY_FILES.plots}/{name}.csv"
                for name in ("clients", "matrices", "partition")
            ],
            recorded=[
                str(STUDY_FILES.run_keys(algorithm))
                for algorithm in STUDY_PLAN.algorithms
            ],
        log:
            f"{STUDY_FILES.path}/logs/table.log",
        localrule: True
        conda:
            CONDA
        params:
            study=str(STUDY_PLAN.params),
            scale=SCALE,
            shown=shown(STUDY_PLAN),
            shared=STUDY_PLAN.shared,  # the table tells which runs are of other code
        shell:
            "fedpipe table --params {params.study:q} --scale {params.scale} --plan-fingerprint {params.shown} > {log:q} 2>&1"

    rule:
        name:
            f"curves{STUDY_RULE}"
        input:
            collected(STUDY_PLAN, "metrics.parquet"),
        output:
            report(
                f"{STUDY_FILES.figures}/curves.svg",
                caption="../report/curves.rst",
                category="Results",
                labels={"shows": "learning curves"},
            ),
            f"{STUDY_FILES.figures}/curves.pdf",
            f"{STUDY_FILES.figures}/curves.png",
        log:
            f"{STUDY_FILES.path}/logs/curves.log",
        localrule: True
        conda:
            CONDA
        params:
            study=str(STUDY_PLAN.params),
            scale=SCALE,
            shown=shown(STUDY_PLAN),
        shell:
            "fedpipe figure curves --params {params.study:q} --scale {params.scale} --plan-fingerprint {params.shown} > {log:q} 2>&1"

    rule:
        name:
            f"matrices{STUDY_RULE}"
        input:
            collected(STUDY_PLAN, "matrices.parquet"),
        output:
            report(
                f"{STUDY_FILES.figures}/matrices.svg",
                caption="../report/matrices.rst",
                category="Results",
                labels={"shows": "SL and CR matrices"},
            ),
            f"{STUDY_FILES.figures}/matrices.pdf",
            f"{STUDY_FILES.figures}/matrices.png",
        log:
            f"{STUDY_FILES.path}/logs/matrices.log",
        localrule: True
        conda:
            CONDA
        params:
            study=str(STUDY_PLAN.params),
            scale=SCALE,
            shown=shown(STUDY_PLAN),
        shell:
            "fedpipe figure matrices --params {params.study:q} --scale {params.scale} --plan-fingerprint {params.shown} > {log:q} 2>&1"

    rule:
        name:
            f"partition_figure{STUDY_RULE}"
        input:
            of_partition(STUDY_PLAN, "results/partitions/{}/assignment.parquet".format),
        output:
            report(
                f"{STUDY_FILES.figures}/partition-{{partition}}.svg",
                caption="../report/partition.rst",
                category="Partitions",
                labels=of_partition(STUDY_PLAN, STUDY_PLAN.describe_partition),
            ),
            f"{STUDY_FILES.figures}/partition-{{partition}}.pdf",
            f"{STUDY_FILES.figures}/partition-{{partition}}.png",
        log:
            f"{STUDY_FILES.path}/logs/partition-figure/{{partition}}.log",
        localrule: True
        conda:
            CONDA
        params:
            study=str(STUDY_PLAN.params),
            scale=SCALE,
            key=of_partition(STUDY_PLAN, str),
        shell:
            "fedpipe figure partition {params.key} --params {params.study:q} --scale {params.scale} > {log:q} 2>&1"
