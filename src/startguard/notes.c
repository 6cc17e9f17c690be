// SPDX-License-Identifier: Apache-2.0
#include "notes.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static bool is_letter_or_digit(char character)
{
    char lower = (char)(character | 0x20);
    return (lower >= 'a' && lower <= 'z') || (character >= '0' && character <= '9');
}

bool is_note_name(const char *text, size_t length)
{
    if (length == 0 || length >= NOTE_NAME_SIZE || !is_letter_or_digit(text[0]))
        return false;
    for (size_t at = 1; at < length; at++)
        if (!is_letter_or_digit(text[at]) && text[at] != '.' && text[at] != '-' && text[at] != '_')
            return false;
    return true;
}

size_t format_note(const struct cpus *used, const struct cpus *allowed, char note[NOTE_SIZE])
{
    char used_text[CPUS_TEXT_SIZE];
    char allowed_text[CPUS_TEXT_SIZE];
    cpus_format(used, used_text);
    cpus_format(allowed, allowed_text);
    return (size_t)snprintf(note, NOTE_SIZE, NOTE_FORMAT "\t%s\t%s\n", used_text, allowed_text);
}

static DIR *open_folder(const char *program)
{
    char path[PATH_MAX + sizeof "/" NOTES_FOLDER];
    const char *slash = strrchr(program, '/');
    if (slash == NULL || slash - program >= PATH_MAX)
        return NULL;
    snprintf(path, sizeof path, "%.*s/" NOTES_FOLDER, (int)(slash - program), program);
    int descriptor = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (descriptor < 0)
        return NULL;
    DIR *folder = fdopendir(descriptor);
    if (folder == NULL)
        close(descriptor);
    return folder;
}

static bool has_room(DIR *folder)
{
    // "." and ".." are two more.
    int entries = 0;
    while (entries < MOST_NOTES + 2 && readdir(folder) != NULL)
        entries++;
    return entries < MOST_NOTES + 2;
}

static void write_note(int folder, const char *name, const char *note, size_t length)
{
    char temporary[sizeof "." - 1 + NOTE_NAME_SIZE];
    snprintf(temporary, sizeof temporary, ".%s", name);
    int descriptor = openat(folder, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (descriptor < 0)
        return;
    bool whole = write(descriptor, note, length) == (ssize_t)length;
    if (close(descriptor) != 0 || !whole || renameat(folder, temporary, folder, name) != 0)
        unlinkat(folder, temporary, 0);
}

void leave_note(const char *program, const char *name, const struct cpus *used, const struct cpus *allowed)
{
    char note[NOTE_SIZE];
    // Whoever started this may have limited the size of files; the signal would end it.
    signal(SIGXFSZ, SIG_IGN);
    DIR *folder = open_folder(program);
    if (folder == NULL)
        return;
    // A container of several claims has as many hooks: the first one has said all.
    if (faccessat(dirfd(folder), name, F_OK, AT_SYMLINK_NOFOLLOW) != 0 && has_room(folder))
        write_note(dirfd(folder), name, note, format_note(used, allowed, note));
    closedir(folder);
}
