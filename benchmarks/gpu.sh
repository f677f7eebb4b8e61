#!/usr/bin/env bash
# Measure fedpipe on a GPU, and print all figures as JSON: `bash benchmarks/gpu.sh > gpu.json`.
#
# Samples are synthetic, so you need no data. All parts together end after TOTAL seconds (540). Each part has a time
# limit. If a part fails or takes too long, its entry has the error and the numbers that it wrote before, the other
# parts run, and the exit status is 1. The progress is on standard error. All other files are in a temporary folder.
#
#   DEVICE   device (cuda). On a CPU, graphs are not recorded.
#   MODELS   models of round.py ("cnn4 resnet18")
#   CLIENTS  numbers of clients ("20 100")
#   STACKS   numbers of clients in one call ("1 8 32")
#   PFLLIB   clone of PFLlib. Without it, only fedpipe runs in the comparison with PFLlib.
#   PYTHON   Python with fedpipe's packages (python3)
#   SMALL    if it is 1, all parts have tiny sizes and ten times as much time, to test the script
#   TOTAL    seconds of all parts (540)
set -u

root=$(cd "$(dirname "$0")/.." && pwd) || exit
folder=$(mktemp -d) || exit
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3} device=${DEVICE:-cuda} models=${MODELS:-cnn4 resnet18}
if [ "${SMALL:-0}" = 1 ]; then
	clients=${CLIENTS:-2 3} stacks=${STACKS:-1 2} samples=40 few_samples=40 rounds=1 total=${TOTAL:-5400} factor=10
	tests=(-k "fedavg and (recorded or test_contract and (hooks or traffic))" -n 0) peers=(--case mnist --samples 1000 --rounds 1)
else
	clients=${CLIENTS:-20 100} stacks=${STACKS:-1 8 32} samples=20000 few_samples=4000 rounds=2 total=${TOTAL:-540} factor=1
	tests=(-k "recorded or test_contract and (fedavg or scaffold or feddw or cwfedavg or fedala or pfps_lwc)" -n auto)
	peers=(--case mnist cifar10 --rounds 2)
fi
export TMPDIR=$folder MPLCONFIGDIR=$folder CUDA_CACHE_PATH=$folder/cuda HYPOTHESIS_STORAGE_DIRECTORY=$folder/hypothesis
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} FEDPIPE_DEVICE=$device
cd "$root" || exit

# Run a part with a limit in seconds. It writes its numbers to $folder/NAME.json or .xml.
part() {
	local name=$1 limit=$(($2 * factor)) begin=$SECONDS status=0
	shift 2
	((total - SECONDS < limit)) && limit=$((total - SECONDS))
	echo "$name" >> "$folder/parts"
	echo "gpu.sh: $name" >&2
	if ((limit > 0)); then
		timeout --signal INT --kill-after 5 "$limit" "$@" > "$folder/$name.log" 2>&1 || status=$?
	else
		status=124
	fi
	echo "$status $((SECONDS - begin)) $limit" > "$folder/$name.status"
}

measure_rounds() {
	local name=$1 limit=$2
	shift 2
	part "$name" "$limit" "$python" benchmarks/round.py --device "$device" --rounds "$rounds" \
		--json "$folder/$name.json" "$@"
}

part contract 90 "$python" -m pytest -q -p no:cacheprovider tests/algorithms/test_contract.py \
	tests/engine/test_capture.py "${tests[@]}" --junitxml "$folder/contract.xml"
for model in $models; do
	for repetition in 1 2; do # in two processes, whose digests must be equal
		measure_rounds "bits-$model-$repetition" 45 --model "$model" --clients "${clients%% *}" --samples "$few_samples" \
			--stack 8 --graphs both --only-rounds
	done
done
for model in $models; do
	options=(--ladder both)
	[ "$model" = resnet18 ] && options=(--ladder on --rounds 1) # its rounds take up to 11 s each
	for number in $clients; do
		# shellcheck disable=SC2086  # one argument for each width
		measure_rounds "round-$model-$number" 110 --model "$model" --clients "$number" --samples "$samples" \
			--stack $stacks --graphs both "${options[@]}"
	done
done
part peers 100 "$python" benchmarks/peers.py --device "$device" --synthetic --system fedpipe pfllib \
	${PFLLIB:+--pfllib "$PFLLIB"} "${peers[@]}" --json "$folder/peers.json"

"$python" benchmarks/gpu_figures.py "$folder"
