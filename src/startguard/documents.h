// SPDX-License-Identifier: Apache-2.0
// What the guard reads of the two JSON documents that the runtime has written: the container's state, which comes on
// standard input, and the bundle's config.json.
//
// A document is a text with YYJSON_PADDING_SIZE writable bytes after its end; reading it changes it.
#ifndef STARTGUARD_DOCUMENTS_H
#define STARTGUARD_DOCUMENTS_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "cpus.h"
#include "notes.h"
#include "refusal.h"

// The arguments of a guard hook, the same in all versions of the driver: name, format, claim UID, cpulist.
enum { HOOK_ARGUMENTS = 4 };
#define HOOK_NAME "dracpu-start-guard"
#define HOOK_FORMAT "v1"

struct state {
    pid_t pid;
    char bundle[PATH_MAX];
    char id[NOTE_NAME_SIZE]; // empty if it has none that may be a note's name
};

// One hook as the runtime runs it.
struct hook {
    const char *path;
    const char *const *arguments; // HOOK_ARGUMENTS of them
};

// Checks the arguments of a guard hook.
bool check_arguments(const struct hook *hook, struct refusal *refusal);

bool read_state(char *text, size_t length, struct state *state, struct refusal *refusal);

// Adds to `allowed` the CPUs of all guard hooks that run this same program; the one that runs now must be among them.
bool read_allowed(char *text, size_t length, const struct hook *own, struct cpus *allowed, struct refusal *refusal);

#endif
