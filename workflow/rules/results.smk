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
        report(
            f"{FILES.tables}/results.md",
            caption="../report/table.rst",
            category="Results",
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
        ),
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
        ),
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
        "results/partitions/{key}/assignment.parquet",
    output:
        report(
            f"{FILES.figures}/partition-{{key}}.svg",
            caption="../report/partition.rst",
            category="Partitions",
        ),
        f"{FILES.figures}/partition-{{key}}.png",
    log:
        f"{FILES.path}/logs/partition-figure/{{key}}.log",
    conda:
        CONDA
    params:
        study=STUDY,
        scale=SCALE,
    shell:
        "fedpipe figure partition {wildcards.key} --params {params.study:q} --scale {params.scale} > {log:q} 2>&1"
