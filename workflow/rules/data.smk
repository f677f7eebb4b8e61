rule download:
    input:
        settings=ancient("results/data/{dataset}.yaml"),
    output:
        "results/data/{dataset}.pt",
        "results/data/{dataset}.json",
    log:
        "results/logs/download/{dataset}.log",
    conda:
        CONDA
    shell:
        "fedpipe download {wildcards.dataset} > {log} 2>&1"


rule partition:
    input:
        settings=ancient("results/partitions/{key}/partition.yaml"),
        data=STUDY_DAG.get_partition_input,
    output:
        "results/partitions/{key}/assignment.parquet",
        "results/partitions/{key}/assignment.json",
        "results/partitions/{key}/heterogeneity.parquet",
    log:
        "results/logs/partition/{key}.log",
    conda:
        CONDA
    shell:
        "fedpipe partition {wildcards.key} > {log} 2>&1"
