# What the study looks at in stored states (section `diagnostics`). Of a run it reads what is joined, which tells that its
# states are there; another setting is another file, and trains nothing.

# DVC records these folders, whether or not a study of this clone has diagnostics, or models with a frozen base.
for name in ("diagnostics", "features"):
    Path("results", name).mkdir(parents=True, exist_ok=True)


rule diagnostic:
    input:
        unpack(STUDY_DAG.get_diagnostic_input),
    output:
        "results/diagnostics/{algorithm}/{key}/{round}/{diagnostic}.parquet",
        "results/diagnostics/{algorithm}/{key}/{round}/{diagnostic}.json",
    log:
        "results/logs/diagnostic/{algorithm}-{key}-{round}-{diagnostic}.log",
    conda:
        CONDA
    shell:
        "fedpipe diagnostic results/diagnostics/{wildcards.algorithm}/{wildcards.key}/{wildcards.round}/{wildcards.diagnostic}.yaml "
        "--threads {threads} > {log} 2>&1"
