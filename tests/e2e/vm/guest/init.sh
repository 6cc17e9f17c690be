#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The first process of the guest: gives it what an init system would, then does what the tests outside ask for.
export PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2> /dev/null
mkdir -p /dev/pts /dev/shm /run
mount -t devpts devpts /dev/pts
for folder in /dev/shm /run /tmp; do mount -t tmpfs tmpfs $folder; done
mount -t cgroup2 none /sys/fs/cgroup
for controller in cpuset cpu memory pids io; do echo +$controller > /sys/fs/cgroup/cgroup.subtree_control; done
for module in failover net_failover virtio_net overlay; do busybox insmod /modules/$module.ko; done
busybox ip link set lo up
busybox ip link set eth0 up
busybox ip addr add 10.0.2.15/24 dev eth0
busybox ip route add default via 10.0.2.2
hostname vm
mkdir -p /run/nri /run/cdi
python3 -I /guest/agent.py "$DRACPU_AGENT"
sync
busybox poweroff -f
