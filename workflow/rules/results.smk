rule table:
    input:
        collected(
            "metrics.parquet",
            "matrices.parquet",
            "rounds.parquet",
            "joined.json",
            "times.json",
        ),
        expand(
            "results/partitions/{key}/{name}.parquet",
            key=PLAN.partitions,
            name=["assignment", "heterogeneity"],
        ),
    output:
        f"{FILES.tables}/results.csv",
        f"{FILES.tables}/results.md",
        report(
            f"{FILES.tables}/results.html",
            caption="../report/table.rst",
            category="Results",
            labels={"shows": "table of accuracies"},
        ),
        f"{FILES.tables}/statistics.csv",
        f"{FILES.tables}/times.csv",
        f"{FILES.metrics}",
        f"{FILES.plots}/curves.csv",
        [f"{FILES.plots}/{name}.csv" for name in ("clients", "matrices", "partition")],
        recorded=[str(FILES.keys(algorithm)) for algorithm in PLAN.algorithms],
    log:
        f"{FILES.path}/logs/table.log",
    conda:
        CONDA
    params:
        study=STUDY,
        scale=SCALE,
        shown=SHOWN,
        shared=PLAN.shared,  # the table tells which runs are of other code
    shell:
        "fedpipe table --params {params.study:q} --scale {params.scale} > {log:q} 2>&1"


rule curves:
    input:
        collected("metrics.parquet"),
    output:
        report(
            f"{FILES.figures}/curves.svg",
            caption="../report/curves.rst",
            category="Results",
            labels={"shows": "learning curves"},
        ),
        f"{FILES.figures}/curves.pdf",
        f"{FILES.figures}/curves.png",
    log:
        f"{FILES.path}/logs/curves.log",
    conda:
        CONDA
    params:
        study=STUDY,
        scale=SCALE,
        shown=SHOWN,
    shell:
        "fedpipe figure curves --params {params.study:q} --scale {params.scale} > {log:q} 2>&1"


rule matrices:
    input:
        collected("matrices.parquet"),
    output:
        report(
            f"{FILES.figures}/matrices.svg",
            caption="../report/matrices.rst",
            category="Results",
            labels={"shows": "SL and CR matrices"},
        ),
        f"{FILES.figures}/matrices.pdf",
        f"{FILES.figures}/matrices.png",
    log:
        f"{FILES.path}/logs/matrices.log",
    conda:
        CONDA
    params:
        study=STUDY,
        scale=SCALE,
        shown=SHOWN,
    shell:
        "fedpipe figure matrices --params {params.study:q} --scale {params.scale} > {log:q} 2>&1"


rule partition_figure:
    input:
        lambda wildcards: f"results/partitions/{PARTITIONS[wildcards.partition]}/assignment.parquet",
    output:
        report(
            f"{FILES.figures}/partition-{{partition}}.svg",
            caption="../report/partition.rst",
            category="Partitions",
            labels=lambda wildcards: PLAN.partition_told(
                PARTITIONS[wildcards.partition]
            ),
        ),
        f"{FILES.figures}/partition-{{partition}}.pdf",
        f"{FILES.figures}/partition-{{partition}}.png",
    log:
        f"{FILES.path}/logs/partition-figure/{{partition}}.log",
    conda:
        CONDA
    params:
        study=STUDY,
        scale=SCALE,
        key=lambda wildcards: PARTITIONS[wildcards.partition],
    shell:
        "fedpipe figure partition {params.key} --params {params.study:q} --scale {params.scale} > {log:q} 2>&1"
