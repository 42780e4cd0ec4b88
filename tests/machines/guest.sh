# What a guest does as its first process, with control groups as systemd presents them: guest.sh RESULTS PYTHON SLOWNESS TESTS...
# A stage NAME leaves NAME.log, NAME.xml if it is of pytest, and at last NAME.done with its exit status.
groups=/sys/fs/cgroup
cd "$(dirname "$0")/../.." || exit

if [ "$1" = --in-container ]; then # as Docker with the user's entry point: --in-container GROUP COMMAND...
    group=$groups/$2
    shift 2
    umount $groups && mount -t cgroup2 none $groups && mkdir -p "$group" && echo 0 >"$group/cgroup.procs" && exec "$@"
    exit 1
fi

results=$1 python=$2 slowness=$3 user=1000 home=/tmp/home-of-tests
shift 3
delegated=user.slice/app.slice
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin CTPO_TEST_SLOWNESS="$slowness" LANG=C.UTF-8
export HOME=/root PYTHONPATH="$PWD:$PWD/kernels:$PWD/sandbox:$PWD/launchers"

mount -t cgroup2 none $groups
mkdir -p $groups/system.slice/tests.scope $groups/$delegated/tests.scope $groups/docker
for group in . system.slice user.slice $delegated; do echo +memory >$groups/$group/cgroup.subtree_control; done
chown $user $groups/$delegated $groups/$delegated/cgroup.procs $groups/$delegated/cgroup.subtree_control

# The private folders of the host's processes, whose locks are not seen here: what they link to would be swept.
for id in 0 $user; do
    mkdir -p /tmp/ctpo-$id
    mount -t tmpfs -o mode=700,uid=$id none /tmp/ctpo-$id
done

# For another user; the host's files stay as they are, as this is in the memory over them.
mkdir -p $home && chown $user $home && chmod 1777 "$results"
for folder in "$PWD" "$(dirname "$python")" "$(dirname "$(readlink -f "$python")")"; do
    while chmod o+rx "$folder" && [ "$folder" != / ]; do folder=$(dirname "$folder"); done
done

stage() { # NAME GROUP COMMAND...
    name=$1 group=$2
    shift 2
    sh -c 'echo 0 >"$0/cgroup.procs" && exec "$@"' "$groups/$group" "$@" >"$results/$name.log" 2>&1
    echo $? >"$results/$name.part" && mv "$results/$name.part" "$results/$name.done"
}
levels="$python -m tests.machines.levels"
pytest="$python -m pytest -p no:cacheprovider"
selected="not slow and not gpu and not cluster and not machine"
as_user="setpriv --reuid $user --regid $user --clear-groups env HOME=$home USER=tests PYTEST_DEBUG_TEMPROOT=$home"
in_container="unshare --cgroup --mount sh $0 --in-container"
memory=tests/sandbox/test_memory_groups.py

echo "$(uname -r), $(stat --file-system --format %T $groups)" >"$results/booted.part" && mv "$results/booted.part" "$results/booted.done"
stage levels system.slice/tests.scope $levels
stage levels-user $delegated/tests.scope $as_user $levels
stage root-group . $pytest --junitxml "$results/root-group.xml" $memory
stage container docker $in_container . $pytest --junitxml "$results/container.xml" $memory
stage container-moved docker $in_container init $pytest --junitxml "$results/container-moved.xml" $memory
stage root system.slice/tests.scope $pytest --junitxml "$results/root.xml" -m "$selected" "$@"
stage user $delegated/tests.scope $as_user $pytest --junitxml "$results/user.xml" -m "$selected" "$@"
echo o >/proc/sysrq-trigger # off
sleep 60
