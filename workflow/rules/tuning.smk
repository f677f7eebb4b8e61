# The search of section `tune`. A rung ranks the draws by their first rounds on validation samples, and selects those that
# continue, or the winners. Which jobs follow depends on its result, so it is a checkpoint. The runs of all draws are
# known when the study is planned, and a draw that continues is the same run with more rounds.

for PLAN in STUDY_DAG.plan.plans:
    if PLAN.tuning is not None:

        checkpoint:
            name:
                f"rank{STUDY_DAG.get_rule_name_suffix(PLAN)}"
            input:
                STUDY_DAG.get_rung_input(PLAN, checkpoints),
            output:
                f"{PLAN.study_files.tables_folder}/tuning-{{rung}}.json",
            log:
                f"{PLAN.study_files.path}/logs/tuning-{{rung}}.log",
            localrule: True
            conda:
                CONDA
            params:
                rounds=lambda wildcards: int(wildcards.rung),
                study=str(PLAN.params),
                preset=PLAN.preset,
                search=PLAN.search_digest,
            shell:
                "fedpipe rank --rounds {params.rounds} --params {params.study:q} --preset {params.preset} "
                "--search {params.search} > {log:q} 2>&1"
