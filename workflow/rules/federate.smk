# Three ways to split a run into jobs, with the same files and the same bits. A segment is one job with consecutive
# rounds, which resumes after those that exist. It has all rounds of a run and also merges them (the default), or a number
# of rounds (execution.rounds_per_job). With execution.clients_per_job a round has jobs for training of blocks of
# participants, aggregation and evaluation.

if STUDY_DAG.participants_per_job is None:

    rule segment:
        input:
            unpack(STUDY_DAG.get_segment_input),
        output:
            "results/runs/{algorithm}/{key}/segments/{stop}.json",
            dag.MERGED_PATTERN if STUDY_DAG.has_one_job_per_run else [],
        log:
            "results/logs/segment/{algorithm}-{key}-{stop}.log",
        conda:
            CONDA
        params:
            stop=lambda wildcards: int(wildcards.stop),
            collect="--collect" if STUDY_DAG.has_one_job_per_run else "",
        shell:  # exec, so that SIGTERM reaches the segment, which stops at the end of a round
            "exec fedpipe segment results/runs/{wildcards.algorithm}/{wildcards.key} --stop {params.stop} "
            "--threads {threads} {params.collect} > {log} 2>&1"

else:

    rule init:
        input:
            unpack(STUDY_DAG.get_run_input),
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
            unpack(STUDY_DAG.get_round_input),
        output:
            temp("results/runs/{algorithm}/{key}/rounds/{round}/block-{block}.pt"),
        log:
            "results/logs/train/{algorithm}-{key}-{round}-{block}.log",
        conda:
            CONDA
        params:
            round=lambda wildcards: int(wildcards.round),
            block=lambda wildcards: int(wildcards.block),
            size=STUDY_DAG.participants_per_job,
        shell:
            "fedpipe train results/runs/{wildcards.algorithm}/{wildcards.key} --round {params.round} "
            "--block {params.block} --size {params.size} --threads {threads} > {log} 2>&1"

    rule aggregate:
        input:
            unpack(STUDY_DAG.get_round_input),
            blocks=STUDY_DAG.get_block_input,
        output:
            "results/runs/{algorithm}/{key}/rounds/{round}/state.json",
        log:
            "results/logs/aggregate/{algorithm}-{key}-{round}.log",
        conda:
            CONDA
        params:
            round=lambda wildcards: int(wildcards.round),
            blocks=STUDY_DAG.count_blocks,
        shell:
            "fedpipe aggregate results/runs/{wildcards.algorithm}/{wildcards.key} --round {params.round} "
            "--blocks {params.blocks} > {log} 2>&1"

    rule evaluate:
        input:
            unpack(STUDY_DAG.get_run_input),
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


if not STUDY_DAG.has_one_job_per_run:

    rule collect:
        input:
            STUDY_DAG.get_collect_input,
        output:
            dag.MERGED_PATTERN,
        log:
            "results/logs/collect/{algorithm}-{key}-{stop}.log",
        conda:
            CONDA
        params:
            rounds=lambda wildcards: int(wildcards.stop),
        shell:
            "fedpipe collect results/runs/{wildcards.algorithm}/{wildcards.key} --rounds {params.rounds} > {log} 2>&1"
