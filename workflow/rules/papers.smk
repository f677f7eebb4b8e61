# The papers' pages: the studies of a folder, made together, then what print has beside what came of them. They are made
# after a failure, too (`onerror`): what did not come is a dash with its reason.
PAGES = f"results/papers/{SCALE}"


rule papers:
    input:
        f"{PAGES}/index.html",
    shell:
        "echo The pages lie in {input}"


rule pages:
    input:
        [summaries(plan) for plan in WORK.whole],
        collected(WORK, "joined.json"),
        list(WORK.probes),
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
    log:
        f"{PAGES}/pages.log",
    conda:
        CONDA
    params:
        scale=SCALE,
    shell:
        "fedpipe papers --scale {params.scale} > {log:q} 2>&1"
