# Analyses of stored states (section `diagnostics`). They wait for the merged rounds of a run, because its states are
# complete then. A change of a setting gives another file, without training.

# DVC records these folders, even if no study has diagnostics, or models with a frozen base.
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
