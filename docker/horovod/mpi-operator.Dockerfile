# The image of Horovod for an MPIJob of Kubernetes: with Open MPI, sshd, and the user that both run as.
#   docker build -f docker/horovod/mpi-operator.Dockerfile -t lockstep/horovod-mpi:0.1.0 docker/horovod
# Another image of Horovod is named by --build-arg IMAGE=...
# It is no stage of the other Dockerfile: without BuildKit, each build of Horovod's image would build it, too.
ARG IMAGE=lockstep/horovod:0.1.0
FROM ${IMAGE}
USER 0
# Both packages come from the Debian of the image. The host keys that one of them makes would be the same wherever the image
# runs, so they are removed: the operator mounts one pair of keys for each job, which hosts and users share. The mount is a
# Secret, whose modes are not those that sshd asks for, and where ssh cannot write down which hosts it knows. The port needs
# no capability. Pods have none, and sshd with a file capability, as in the operator's base image, could not be executed
# there (capabilities(7)).
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends openmpi-bin openssh-server \
  && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
  && groupadd --gid 1000 mpiuser \
  && useradd --uid 1000 --gid 1000 --create-home --shell /bin/bash mpiuser \
  && printf '%s\n' 'Port 2222' 'StrictHostKeyChecking no' 'UserKnownHostsFile /dev/null' 'LogLevel ERROR' \
    >/etc/ssh/ssh_config.d/mpi-operator.conf \
  && printf '%s\n' 'Port 2222' 'HostKey /home/mpiuser/.ssh/id_rsa' 'StrictModes no' 'AuthenticationMethods publickey' \
    >/home/mpiuser/.sshd_config
USER 1000:1000
