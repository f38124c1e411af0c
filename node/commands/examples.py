"""Examples of every command, which its `--help` shows. A test parses each of them."""

from __future__ import annotations

EXAMPLES = {
    "run": """\
  diloco-node run --join diloco1-...
  diloco-node run --any --bootstrap peer.example:31337
  diloco-node run --from hub:ada/tiny --run.total_tokens 4000000000
""",
    "relay": """\
  diloco-node relay --join diloco1-... --data-dir .data/relay    # on a machine with an open port
  diloco-node relay --join diloco1-... --swarm.announce /dns4/peer.example/tcp/31337
""",
    "steer": """\
  diloco-node steer                       # who may change the run, and what has been changed
  diloco-node steer amend inner.lr=2e-4 total_tokens=4000000000
  diloco-node steer pause --from-round 120                       # from round 120 on, nobody trains
  diloco-node steer resume
  diloco-node steer rollback 96           # parameters and momentum of round 96 come back
  diloco-node steer stop                  # the run is complete, and all nodes stop
If the run needs several signatures:
  diloco-node steer amend inner.lr=2e-4 --from-round 500 --out change.json
  diloco-node steer sign change.json      # by each of the others
  diloco-node steer submit change.json
""",
    "runs": """\
  diloco-node runs --bootstrap peer.example:31337
  diloco-node runs tiny --bootstrap peer.example:31337           # one run, with its invite
  diloco-node runs --json --bootstrap peer.example:31337
""",
    "status": """\
  diloco-node status --watch
  diloco-node status --json --data-dir .data/first
""",
    "peers": """\
  diloco-node peers
  diloco-node peers --by team
""",
    "logs": """\
  diloco-node logs --follow
  diloco-node logs --level warning --lines 200
""",
    "pause": """\
  diloco-node pause --for 1h30m
  diloco-node pause --until "tomorrow 8:00"
  diloco-node pause --after-round 0       # when the current round has ended
""",
    "resume": """\
  diloco-node resume
  diloco-node resume --data-dir .data/first
""",
    "drain": """\
  diloco-node drain
  diloco-node drain --data-dir .data/first
""",
    "leave": """\
  diloco-node leave
  diloco-node leave --data-dir .data/first
""",
    "invite": """\
  diloco-node invite
  diloco-node invite --data-dir .data/first
""",
    "config": """\
  diloco-node config
  diloco-node config --data-dir .data/first
""",
    "install-service": """\
  diloco-node install-service --join diloco1-... --dry-run       # what it would write and run
  diloco-node install-service --join diloco1-...                 # your own service
  sudo /opt/diloco/bin/diloco-node install-service --join diloco1-... --limits.upload_mbit_s 10
  diloco-node install-service --remove
""",
    "update": """\
  diloco-node update                      # is there a newer version?
  diloco-node update --install
""",
    "completion": """\
  diloco-node completion bash > ~/.local/share/bash-completion/completions/diloco-node
  diloco-node completion fish > ~/.config/fish/completions/diloco-node.fish
""",
    "doctor": """\
  diloco-node doctor
  diloco-node doctor --join diloco1-... --members 16
""",
    "export": """\
  diloco-node export my-model             # config.json, model.safetensors, tokenizer, README.md, diloco.json
  diloco-node export my-model --gguf      # and model-f16.gguf
  diloco-node verify my-model             # are all files unchanged, and is the digest right?
""",
    "site": """\
  diloco-node site /var/www/run           # again after each round, until Ctrl-C
  diloco-node site /var/www/run --once
""",
    "certificate": """\
  diloco-node certificate mine.json --badge mine.svg
  diloco-node certificate                 # print it
""",
    "verify": """\
  diloco-node verify mine.json            # a certificate
  diloco-node verify my-model             # an exported model
""",
    "publish": """\
  diloco-node publish                     # to publish.to
  diloco-node publish hub:ada/tiny
""",
    "evaluate": """\
  diloco-node evaluate my-model --tasks arc_easy,hellaswag --evaluate.limit 200
  diloco-node evaluate my-model --tasks my_task --evaluate.task_dir tasks    # without network
""",
    "owner": """\
  diloco-node owner set Ada --team "Blue Team"                   # name yourself, on one of your machines
  diloco-node owner token                 # print the secret that joins your other machines
  diloco-node owner join diloco-owner1-...                       # on each other machine: one row with yours
  diloco-node owner                       # show the owner of this machine, and what all its machines gave
  diloco-node owner token --new           # after a leak: another secret, and every other machine joins again
  diloco-node owner leave                 # belong to nobody
""",
    "generate": """\
  diloco-node generate "def main("
  diloco-node generate "Once upon a time" --tokens 50 --temperature 0 --seed 1
""",
    "serve": """\
  diloco-node serve --data-dir .data/first
  curl http://127.0.0.1:8000/v1/completions -H "Authorization: Bearer $(cat .data/first/api-token)" \\
    -H "Content-Type: application/json" -d '{"model": "NAME OF THE RUN", "prompt": "def main(", "max_tokens": 50}'
""",
}
"""Lines of a shell, by command."""
