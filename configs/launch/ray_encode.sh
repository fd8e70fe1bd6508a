#!/bin/bash
# Encode on a Ray cluster: each unit is a Ray task. Nodes may join and die meanwhile; the process below hands out work.
#
#   pip install 'sana-pipe[ray]'        on every node, the same version, with the same models and paths
#
# Without a cluster the command starts a local one on this machine.

# ---- the cluster, by hand (skip this where one is running) -----------------------------------------------------------
ray start --head --port 6379                        # on the first node
# ray start --address first-node:6379               # on every other node, now or later

# ---- the work --------------------------------------------------------------------------------------------------------
export RAY_ADDRESS=${RAY_ADDRESS:-first-node:6379}
sana-pipe encode --engine ray --data /data/pictures
# One unit takes a CPU of a node, and a GPU if the cluster has any. A unit whose node dies runs again on another.
# SIGTERM or SIGUSR1 to this process cancels the tasks, which clean up; the same command continues.

# As a Ray job: ray job submit --address http://first-node:8265 -- sana-pipe encode --engine ray --data /data/pictures
