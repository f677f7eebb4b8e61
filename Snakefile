# The table of contents. Rules lie in workflow/rules, what they need to know in results/plan.json (made of params.yaml
# by `fedpipe plan`, again whenever that has changed); nothing here imports torch, since every node parses it anew.
from snakemake.utils import min_version

min_version("9.0")


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/federate.smk"
include: "workflow/rules/diagnostics.smk"
include: "workflow/rules/results.smk"
include: "workflow/rules/papers.smk"


# They take seconds, and download wants the network, which compute nodes of a cluster often lack.
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
        STUDY_DAG.get_final_output(),


rule runs:
    input:
        STUDY_DAG.get_run_output(),


rule partitions:
    input:
        STUDY_DAG.get_partition_output(),
