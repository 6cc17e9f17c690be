// SPDX-License-Identifier: Apache-2.0
// The start guard: lets a container start only if it is held to the CPUs of its claims.
//
//     dracpu-start-guard v1 <claim UID> <cpulist>
//
// The container runtime runs this as a createRuntime hook, which the claim's CDI spec brings into the container's
// configuration: after the container's cgroup is set up and before anything of its image runs. Standard input is the
// container's state. The CPUs that its first process may use must all be among those that the guard hooks of its
// config.json allow together; each claim of the container brings one. Exit status 0 lets the container start; anything
// else makes the runtime refuse it, with our one line on standard error as the reason.
//
// A container on fewer CPUs than its claims have starts too, and the driver is left a note of it.
//
// It works with the driver alive, hung or dead, and trusts only what the runtime itself has written. Environment,
// arguments and annotations of a container are under the control of whoever wrote the pod or the image; they are never
// looked at. Whatever cannot be read or understood refuses the container.
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpus.h"
#include "documents.h"
#include "notes.h"
#include "refusal.h"
#include "third_party/yyjson/yyjson.h"

#define PREFIX "dracpu start guard: "

enum {
    // The hook's own limit in the CDI spec is longer: this one says what happened.
    LIMIT_S = 5,
    // Annotations are part of the state.
    LARGEST_STATE = 4 << 20,
    // The kernel starts no program with more than 6 MiB of arguments and environment; JSON may need more bytes for them.
    LARGEST_CONFIG = 24 << 20,
    FIRST_BUFFER = 128 << 10,
};

// Whether all is well with the container, so that nothing that still happens may stop it.
static volatile sig_atomic_t is_good;

static void write_line(const char *line, size_t length)
{
    // If nobody can be told, the exit status still refuses.
    ssize_t written = write(STDERR_FILENO, line, length);
    (void)written;
}

static void on_alarm(int number)
{
    static const char line[] = PREFIX "the runtime did not give the container's state within 5 s, or the node is "
                                      "overloaded; the container is refused since its CPUs are not known\n";
    (void)number;
    if (is_good)
        _exit(0);
    write_line(line, sizeof line - 1);
    _exit(1);
}

static void limit_time(void)
{
    struct sigaction action = {.sa_handler = on_alarm};
    sigset_t alarm_only;
    sigemptyset(&action.sa_mask);
    sigaction(SIGALRM, &action, NULL);
    // Whoever started this may have blocked it.
    sigemptyset(&alarm_only);
    sigaddset(&alarm_only, SIGALRM);
    sigprocmask(SIG_UNBLOCK, &alarm_only, NULL);
    alarm(LIMIT_S);
}

// Reads to the end; the text has room for yyjson's padding after it.
static bool read_all(int descriptor, const char *name, size_t limit, char **text, size_t *length,
                     struct refusal *refusal)
{
    size_t size = FIRST_BUFFER;
    *length = 0;
    *text = malloc(size + YYJSON_PADDING_SIZE);
    while (*text != NULL) {
        ssize_t got = read(descriptor, *text + *length, size - *length);
        if (got == 0) {
            memset(*text + *length, 0, YYJSON_PADDING_SIZE);
            return true;
        }
        if (got < 0 && errno == EAGAIN)
            poll(&(struct pollfd){.fd = descriptor, .events = POLLIN}, 1, -1);
        else if (got < 0 && errno != EINTR)
            return refuse(refusal, "cannot read %s: %s", name, strerror(errno));
        *length += got > 0 ? (size_t)got : 0;
        if (*length > limit)
            return refuse(refusal, "%s has more than %zu bytes", name, limit);
        if (*length == size) {
            size *= 2;
            *text = realloc(*text, size + YYJSON_PADDING_SIZE);
        }
    }
    return refuse(refusal, "no memory to read %s", name);
}

static bool read_config(const char *bundle, char **text, size_t *length, struct refusal *refusal)
{
    char path[PATH_MAX + sizeof "/config.json"];
    struct stat status;
    int descriptor;
    snprintf(path, sizeof path, "%s/config.json", bundle);
    // O_NONBLOCK: opening must not hang on a FIFO.
    descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (descriptor < 0)
        return refuse(refusal, "cannot open %.250s: %s", path, strerror(errno));
    if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode))
        return refuse(refusal, "%.250s is no regular file", path);
    return read_all(descriptor, "config.json", LARGEST_CONFIG, text, length, refusal);
}

static bool read_affinity(pid_t pid, struct cpus *cpus, struct refusal *refusal)
{
    // Not by glibc's function: the kernel's own says nothing else than what it knows of.
    if (syscall(SYS_sched_getaffinity, pid, sizeof cpus->words, cpus->words) < 0)
        return refuse(refusal, "cannot read the CPU affinity of the container's process %d: %s", (int)pid,
                      strerror(errno));
    return true;
}

static bool check(int count, char **arguments, struct refusal *refusal)
{
    static struct cpus allowed;
    static struct cpus affinity;
    static struct state state;
    const struct hook own = {
        .path = (const char *)getauxval(AT_EXECFN),
        .arguments = (const char *const *)arguments,
    };
    char affinity_text[CPUS_TEXT_SIZE];
    char allowed_text[CPUS_TEXT_SIZE];
    char *text;
    size_t length;
    if (count != HOOK_ARGUMENTS || strcmp(arguments[0], HOOK_NAME) != 0)
        return refuse(refusal, "expected to be run by a container runtime as " HOOK_NAME " " HOOK_FORMAT
                               " <claim UID> <cpulist>");
    if (own.path == NULL)
        return refuse(refusal, "the kernel does not say by which path this program was started");
    if (!check_arguments(&own, refusal) ||
        !read_all(STDIN_FILENO, "the container's state", LARGEST_STATE, &text, &length, refusal) ||
        !read_state(text, length, &state, refusal) || !read_config(state.bundle, &text, &length, refusal) ||
        !read_allowed(text, length, &own, &allowed, refusal) || !read_affinity(state.pid, &affinity, refusal))
        return false;
    if (!cpus_are_none(&affinity) && cpus_within(&affinity, &allowed)) {
        is_good = true;
        if (!cpus_within(&allowed, &affinity) && state.id[0] != '\0')
            leave_note(own.path, state.id, &affinity, &allowed);
        return true;
    }
    cpus_format(&affinity, affinity_text);
    cpus_format(&allowed, allowed_text);
    return refuse(refusal,
                  "the container would run on CPUs %s, but its claims allow CPUs %s only: it was not pinned, most likely "
                  "since the driver dra.cpu is down, hung or late; check the driver's pod on this node, then let the "
                  "container start again",
                  affinity_text, allowed_text);
}

int main(int count, char **arguments)
{
    struct refusal refusal;
    char line[sizeof PREFIX + REFUSAL_SIZE + 1];
    limit_time();
    if (check(count, arguments, &refusal))
        return 0;
    // One write, so that it stays one line whatever else is written there.
    write_line(line, (size_t)snprintf(line, sizeof line, PREFIX "%s\n", refusal.text));
    return 1;
}
