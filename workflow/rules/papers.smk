# The papers' pages: the studies of a folder, made together, then what print has beside what came of them. They are made
# after a failure, too (`onerror`): what did not come is a dash with its reason.
PAGES = f"results/papers/{SCALE}"
MADE_OF = [
    *(name for plan in WORK.complete_plans for name in summaries(plan)),
    *collected(WORK, "joined.json"),
    *WORK.probes,
]


rule papers:
    input:
        MADE_OF,  # so that what was deleted is made again
        pages=f"{PAGES}/index.html",
    log:
        f"{PAGES}/papers.log",
    conda:
        CONDA
    shell:
        "echo The pages lie in {input.pages} | tee {log:q}"


rule pages:
    input:
        MADE_OF,
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
        scale=SCALE,
        printed=printed(),
        shown=compute_plans_fingerprint(WORK.plans),
    shell:
        "fedpipe papers --scale {params.scale} --plan-fingerprint {params.shown} > {log:q} 2>&1"
