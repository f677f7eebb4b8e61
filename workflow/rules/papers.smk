# The papers' pages show the published numbers next to the measured ones of all studies of a folder. They are also made
# after a failure (`onerror`), with a dash and the reason for each missing number.

PAGES = f"results/papers/{SELECTION.preset}"


rule papers:
    input:
        STUDY_DAG.get_paper_pages_input(),  # so that deleted files are restored
        pages=f"{PAGES}/index.html",
    log:
        f"{PAGES}/papers.log",
    conda:
        CONDA
    shell:
        "echo The pages are in {input.pages} | tee {log:q}"


rule pages:
    input:
        STUDY_DAG.get_paper_pages_input(),
    output:
        expand(
            f"{PAGES}/{{name}}",
            name=[
                "index.html",
                "feddw.html",
                "feddual.html",
                "pfps_lwc.html",
                "cwfedavg.html",
                "cells.csv",
            ],
        ),
        directory(f"{PAGES}/figures"),
    log:
        f"{PAGES}/pages.log",
    conda:
        CONDA
    params:
        preset=SELECTION.preset,
        page_sources=dag.hash_paper_pages_sources(),  # the published numbers and the code of the pages
        plans_fingerprint=STUDY_DAG.plans_fingerprint,
    shell:
        "fedpipe papers --preset {params.preset} --plan-fingerprint {params.plans_fingerprint} > {log:q} 2>&1"
