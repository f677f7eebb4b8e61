# The papers' pages: the studies of a folder, made together, then what print has beside what came of them. They are made
# after a failure, too (`onerror`): what did not come is a dash with its reason.
from fedpipe import papers

PAGES = f"results/papers/{SELECTION.preset}"


rule papers:
    input:
        STUDY_DAG.get_pages_input(),  # so that deleted files are made again
        pages=f"{PAGES}/index.html",
    log:
        f"{PAGES}/papers.log",
    conda:
        CONDA
    shell:
        "echo The pages lie in {input.pages} | tee {log:q}"


rule pages:
    input:
        STUDY_DAG.get_pages_input(),
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
        printed=dag.hash_files(Path(papers.__file__).parent.glob("*.*")),  # and how pages show it
        shown=STUDY_DAG.plans_fingerprint,
    shell:
        "fedpipe papers --preset {params.preset} --plan-fingerprint {params.shown} > {log:q} 2>&1"
