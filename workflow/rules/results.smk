rule table:
    input:
        collected("metrics.parquet"),
        collected("rounds.parquet"),
        collected("times.json"),
    output:
        "results/tables/results.csv",
        report(
            "results/tables/results.md",
            caption="../report/table.rst",
            category="Results",
        ),
        "results/tables/times.csv",
        "results/metrics.json",
        "results/plots/curves.csv",
        recorded=expand("results/keys/{algorithm}.json", algorithm=PLAN["algorithms"]),
    log:
        "results/logs/table.log",
    conda:
        "../envs/fedpipe.yaml"
    params:
        report=PLAN["report"],
    shell:
        "fedpipe table > {log} 2>&1"


rule curves:
    input:
        collected("metrics.parquet"),
    output:
        report(
            "results/figures/curves.svg",
            caption="../report/curves.rst",
            category="Results",
        ),
        "results/figures/curves.png",
    log:
        "results/logs/curves.log",
    conda:
        "../envs/fedpipe.yaml"
    params:
        report=PLAN["report"],
    shell:
        "fedpipe figure curves > {log} 2>&1"


rule matrices:
    input:
        collected("matrices.parquet"),
    output:
        report(
            "results/figures/matrices.svg",
            caption="../report/matrices.rst",
            category="Results",
        ),
        "results/figures/matrices.png",
    log:
        "results/logs/matrices.log",
    conda:
        "../envs/fedpipe.yaml"
    shell:
        "fedpipe figure matrices > {log} 2>&1"


rule partition_figure:
    input:
        "results/partitions/{key}/assignment.parquet",
    output:
        report(
            "results/figures/partition-{key}.svg",
            caption="../report/partition.rst",
            category="Partitions",
        ),
        "results/figures/partition-{key}.png",
    log:
        "results/logs/partition-figure/{key}.log",
    conda:
        "../envs/fedpipe.yaml"
    shell:
        "fedpipe figure partition {wildcards.key} > {log} 2>&1"
