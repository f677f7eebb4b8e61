# What the study looks at in stored states (section `probes`). Of a run it reads what is joined, which tells that its
# states are there; another setting is another file, and trains nothing.

# DVC records these folders, whether or not a study of this clone has probes, or models with a frozen base.
for name in ("probes", "features"):
    Path("results", name).mkdir(parents=True, exist_ok=True)


rule probe:
    input:
        unpack(STUDY_DAG.get_probe_input),
    output:
        "results/probes/{algorithm}/{key}/{round}/{probe}.parquet",
        "results/probes/{algorithm}/{key}/{round}/{probe}.json",
    log:
        "results/logs/probe/{algorithm}-{key}-{round}-{probe}.log",
    conda:
        CONDA
    shell:
        "fedpipe probe results/probes/{wildcards.algorithm}/{wildcards.key}/{wildcards.round}/{wildcards.probe}.yaml "
        "--threads {threads} > {log} 2>&1"
