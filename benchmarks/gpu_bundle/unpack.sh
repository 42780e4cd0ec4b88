#!/bin/sh
# sh unpack.sh TARGET: checks the archives beside this file against manifest.json and unpacks them into TARGET.
# Then PYTHONPATH=TARGET is enough. PYTHON=... names another interpreter than python3. Archives may come one after another.
set -eu
[ $# -eq 1 ] || { echo "usage: sh $0 TARGET" >&2; exit 2; }
exec "${PYTHON:-python3}" - "$(dirname "$0")" "$1" <<'EOF'
import hashlib, importlib.metadata, json, sys, tarfile
from pathlib import Path

here, target = map(Path, sys.argv[1:])
manifest = json.loads((here / "manifest.json").read_text())
python = "%d.%d" % sys.version_info[:2]
if python != manifest["python"]:
    sys.exit("%s is Python %s, the bundle is for %s: PYTHON=... names another" % (sys.executable, python, manifest["python"]))
expected = {archive["name"]: archive for archive in manifest["archives"]}
archives = sorted(here.glob("*.tar.xz"))
problems = [] if archives else ["no archive lies in %s, of %s" % (here, ", ".join(expected))]
for path in archives:
    if path.name not in expected:
        problems.append("%s is not in manifest.json" % path.name)
        continue
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != (wanted := expected[path.name]["sha256"]):
        problems.append("%s is damaged, bring it again: sha256 %s, manifest.json says %s" % (path.name, digest, wanted))
if problems:
    sys.exit("\n".join(problems))
for path in archives:
    with tarfile.open(path) as archive:
        archive.extractall(target, filter="data")
    print("unpacked %s" % path.name)
if absent := sorted(expected.keys() - {path.name for path in archives}):
    print("not here: %s" % ", ".join(absent))
here_already = {(dist.metadata["Name"] or "").lower().replace("_", "-") for dist in importlib.metadata.distributions()}
if lacking := sorted(set(manifest["machine"]) - here_already):
    print("warning: this Python lacks what the bundle expects: %s" % ", ".join(lacking), file=sys.stderr)
EOF
