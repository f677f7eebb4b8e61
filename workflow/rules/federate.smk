# Three grains of one DAG, with the same files and the same bits. A segment, one job, runs consecutive rounds, and goes on
# from those it finds: all of a run's, and then it collects them (the default), or so many (execution.rounds_per_job).
# Single rounds (execution.clients_per_job) train blocks of participants, aggregate, evaluate.

if BLOCK is None:

    rule segment:
        input:
            unpack(segment_inputs),
        output:
            "results/runs/{algorithm}/{key}/segments/{stop}.json",
            JOINED if WHOLE else [],
        log:
            "results/logs/segment/{algorithm}-{key}-{stop}.log",
        conda:
            CONDA
        params:
            stop=lambda wildcards: int(wildcards.stop),
            collect="--collect" if WHOLE else "",
        shell:  # exec: so that SIGTERM ends no shell above it, and the segment stops at a round's end
            "exec fedpipe segment results/runs/{wildcards.algorithm}/{wildcards.key} --stop {params.stop} "
            "--threads {threads} {params.collect} > {log} 2>&1"

else:

    rule init:
        input:
            unpack(run_inputs),
        output:
            "results/runs/{algorithm}/{key}/rounds/0000/state.json",
        log:
            "results/logs/init/{algorithm}-{key}.log",
        conda:
            CONDA
        shell:
            "fedpipe initialize results/runs/{wildcards.algorithm}/{wildcards.key} > {log} 2>&1"

    rule train:
        input:
            unpack(train_inputs),
        output:
            temp("results/runs/{algorithm}/{key}/rounds/{round}/block-{block}.pt"),
        log:
            "results/logs/train/{algorithm}-{key}-{round}-{block}.log",
        conda:
            CONDA
        params:
            round=lambda wildcards: int(wildcards.round),
            block=lambda wildcards: int(wildcards.block),
            size=BLOCK,
        shell:
            "fedpipe train results/runs/{wildcards.algorithm}/{wildcards.key} --round {params.round} "
            "--block {params.block} --size {params.size} --threads {threads} > {log} 2>&1"

    rule aggregate:
        input:
            unpack(train_inputs),
            blocks=block_files,
        output:
            "results/runs/{algorithm}/{key}/rounds/{round}/state.json",
        log:
            "results/logs/aggregate/{algorithm}-{key}-{round}.log",
        conda:
            CONDA
        params:
            round=lambda wildcards: int(wildcards.round),
            blocks=lambda wildcards: len(blocks(wildcards)),
        shell:
            "fedpipe aggregate results/runs/{wildcards.algorithm}/{wildcards.key} --round {params.round} "
            "--blocks {params.blocks} > {log} 2>&1"

    rule evaluate:
        input:
            unpack(run_inputs),
            state="results/runs/{algorithm}/{key}/rounds/{round}/state.json",
        output:
            "results/runs/{algorithm}/{key}/rounds/{round}/round.json",
        log:
            "results/logs/evaluate/{algorithm}-{key}-{round}.log",
        conda:
            CONDA
        params:
            round=lambda wildcards: int(wildcards.round),
        shell:
            "fedpipe evaluate results/runs/{wildcards.algorithm}/{wildcards.key} --round {params.round} "
            "--threads {threads} > {log} 2>&1"


if not WHOLE:

    rule collect:
        input:
            rounds_done,
        output:
            JOINED,
        log:
            "results/logs/collect/{algorithm}-{key}-{stop}.log",
        conda:
            CONDA
        params:
            rounds=lambda wildcards: int(wildcards.stop),
        shell:
            "fedpipe collect results/runs/{wildcards.algorithm}/{wildcards.key} --rounds {params.rounds} > {log} 2>&1"
