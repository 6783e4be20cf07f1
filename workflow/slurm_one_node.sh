#!/usr/bin/env bash
# Try the workflow on a real Slurm cluster of one machine, this one (Debian, as root, no systemd needed):
#
#   workflow/slurm_one_node.sh                           workflow/slurm_one_node.yaml up to stage 04, which has two parts
#   workflow/slurm_one_node.sh NAME [TARGET ...]         what workflow/run.py takes
#
# PYTHON=...  an interpreter with the extra `slurm` (default .venv/bin/python: make EXTRA=cpu,slurm).
# KEEP=1      leave the temporary folder (configuration, logs, state); the daemons are stopped in any case.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
RUN=("$@")
[ $# -gt 0 ] || RUN=(workflow/slurm_one_node.yaml runs/slurm_extract/extract/manifest.json)

fail() { echo "slurm_one_node.sh: $*" >&2; exit 1; }

# 1. What it needs.
[ "$(id -u)" = 0 ] || fail "found user $(id -un), expected root: slurmd starts jobs for users"
"$PYTHON" -c 'import snakemake_executor_plugin_slurm' 2>/dev/null \
  || fail "$PYTHON lacks snakemake-executor-plugin-slurm; make EXTRA=cpu,slurm installs it"
for daemon in slurmctld slurmd; do
  ! pgrep -x "$daemon" >/dev/null || fail "$daemon runs already: this machine has a Slurm, use workflow/profiles/slurm"
done
[ ! -e /etc/slurm/slurm.conf ] || fail "found /etc/slurm/slurm.conf: this machine has a Slurm, use workflow/profiles/slurm"
if [ "$(command -v munged slurmctld slurmd sinfo | wc -l)" -lt 4 ]; then
  command -v apt-get >/dev/null || fail "found no slurmctld, slurmd, munged and no apt-get to install them"
  apt-get update -qq || fail "apt-get update failed"
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null \
    || fail "apt-get could not install slurm-wlm and munge"
fi

# 2. A cluster of this machine, all of it in one temporary folder. A link in /etc leads to its configuration: the variable
# SLURM_CONF would not do, the plugin takes it from the jobs.
TMP=$(mktemp -d /tmp/slurm-one-node.XXXXXX)
chmod 755 "$TMP"
mkdir "$TMP/state" "$TMP/spool"
stop() {
  rm -f /etc/slurm/slurm.conf
  for daemon in slurmd slurmctld munged; do
    [ ! -s "$TMP/$daemon.pid" ] || kill "$(cat "$TMP/$daemon.pid")" 2>/dev/null || true
  done
  sleep 2
  if [ "${KEEP:-}" = 1 ]; then echo "kept $TMP"; else rm -rf "$TMP"; fi
}
trap stop EXIT
CPUS=$(env -u OMP_NUM_THREADS nproc)
MEMORY=$(slurmd -C | sed -n 's/.*RealMemory=\([0-9]*\).*/\1/p')
cat >"$TMP/slurm.conf" <<CONF
ClusterName=one
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
AuthInfo=socket=$TMP/munge.socket
StateSaveLocation=$TMP/state
SlurmdSpoolDir=$TMP/spool
SlurmctldPidFile=$TMP/slurmctld.pid
SlurmdPidFile=$TMP/slurmd.pid
SlurmctldLogFile=$TMP/slurmctld.log
SlurmdLogFile=$TMP/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
ReturnToService=2
# No slurmdbd: finished jobs stay visible to squeue and scontrol for an hour, and a line about each goes to jobs.txt.
AccountingStorageType=accounting_storage/none
MinJobAge=3600
JobCompType=jobcomp/filetxt
JobCompLoc=$TMP/jobs.txt
NodeName=one NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 CPUs=$CPUS RealMemory=$MEMORY
PartitionName=all Nodes=one Default=YES MaxTime=INFINITE
CONF
mkdir -p /etc/slurm
ln -s "$TMP/slurm.conf" /etc/slurm/slurm.conf

# 3. Its daemons.
head -c 1024 /dev/urandom >"$TMP/munge.key"
chmod 600 "$TMP/munge.key"
munged --key-file="$TMP/munge.key" --socket="$TMP/munge.socket" --pid-file="$TMP/munged.pid" \
  --log-file="$TMP/munged.log" --seed-file="$TMP/munged.seed" || fail "munged did not start"
slurmctld || fail "slurmctld did not start: $(tail -n 3 "$TMP/slurmctld.log")"
slurmd || fail "slurmd did not start: $(tail -n 3 "$TMP/slurmd.log")"
for second in $(seq 60); do
  [ "$(sinfo -h -o %T 2>/dev/null)" != idle ] || break
  [ "$second" -lt 60 ] || fail "the node is not idle after 60 s: $(sinfo -h -o '%T %E'; tail -n 3 "$TMP/slurmd.log")"
  sleep 1
done
sinfo

# 4. The workflow. One CPU for a job, so that two CPUs run two parts of stage 04 side by side; the memory is shared alike.
echo "+ workflow/run.py ${RUN[*]} --profile workflow/profiles/slurm"
status=0
"$PYTHON" workflow/run.py "${RUN[@]}" --profile workflow/profiles/slurm --cores "$CPUS" --max-threads 1 \
  --default-resources mem_mb=$((MEMORY / CPUS)) runtime=60 \
  --slurm-no-account --slurm-status-command squeue --slurm-init-seconds-before-status-checks 5 --latency-wait 10 || status=$?

# 5. What Slurm saw. %k is the rule, as the plugin writes it into the job's comment.
squeue --states=all --sort=i -o '%.5i %.9T %.4C %.7m %.20S %.20e %.10M %k'
exit "$status"
