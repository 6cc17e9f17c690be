// SPDX-License-Identifier: Apache-2.0
// Notes for the driver: of a container that was let start although the kernel allows it fewer CPUs than its claims.
//
// A note is a file named after the container's id in a folder of the driver's beside this program. That folder's being
// there means that a driver reads them; without it none is left. Nothing here ever fails: no note is worth a container.
#ifndef STARTGUARD_NOTES_H
#define STARTGUARD_NOTES_H

#include <stdbool.h>
#include <stddef.h>

#include "cpus.h"

// Drivers that are older or newer than this program read notes too: these never change, only NOTE_FORMAT does.
#define NOTES_FOLDER "guard-notes"
#define NOTE_FORMAT "v1"

// More than a node has containers. If the driver is away for long the first ones stay.
enum { MOST_NOTES = 1000 };

// The longest name of a note, with its end: container runtimes use 64 characters.
enum { NOTE_NAME_SIZE = 129 };

// The longest note, with its end.
enum { NOTE_SIZE = sizeof(NOTE_FORMAT) + 2 * (CPUS_TEXT_SIZE + 1) };

// Whether a text may be a note's name: letters, digits, dots, dashes and underscores, with a letter or digit first.
bool is_note_name(const char *text, size_t length);

// Writes a note's one line: the format, the CPUs in use and those of the claims, with tabs between. Returns its length.
size_t format_note(const struct cpus *used, const struct cpus *allowed, char note[NOTE_SIZE]);

// Leaves a note in the folder beside a program, if there is one and it has room.
void leave_note(const char *program, const char *name, const struct cpus *used, const struct cpus *allowed);

#endif
