# The rules are in workflow/rules. They read results/plan.json, which `fedpipe plan` makes from params.yaml after each
# change. Every job parses this file, so import only modules that load without torch.


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/federate.smk"
include: "workflow/rules/diagnostics.smk"
include: "workflow/rules/tuning.smk"
include: "workflow/rules/results.smk"
include: "workflow/rules/papers.smk"


# These rules take seconds. download needs the network, which compute nodes of a cluster often lack.
localrules:
    all,
    papers,
    pages,
    runs,
    partitions,
    download,


rule all:
    default_target: True
    input:
        STUDY_DAG.get_all_results(),
        *STUDY_DAG.get_tuned_run_output(checkpoints),


rule runs:
    input:
        STUDY_DAG.get_untuned_run_output(),
        *STUDY_DAG.get_tuned_run_output(checkpoints),


rule partitions:
    input:
        STUDY_DAG.get_partition_output(),
