// SPDX-License-Identifier: Apache-2.0
// Why a container must not start: one line for the person who reads the pod's events.
#ifndef STARTGUARD_REFUSAL_H
#define STARTGUARD_REFUSAL_H

#include <stdbool.h>

// The kubelet cuts its events at about 1,000 bytes, and the runtime has put 300 of its own before ours.
enum { REFUSAL_SIZE = 600 };

struct refusal {
    char text[REFUSAL_SIZE];
};

// Sets the reason. What does not fit is cut, and what would not print, or start a second line, becomes '?'.
// Always returns false, for functions that return whether all is well.
__attribute__((format(printf, 2, 3))) bool refuse(struct refusal *refusal, const char *format, ...);

#endif
