// SPDX-License-Identifier: Apache-2.0
#include "documents.h"

#include <stdint.h>
#include <string.h>

#include "third_party/yyjson/yyjson.h"

enum { CLAIM_UID_LENGTH = 63 };

static yyjson_doc *parse(char *text, size_t length, const char *name, struct refusal *refusal)
{
    yyjson_read_err error;
    if (length == 0) {
        refuse(refusal, "%s is empty", name);
        return NULL;
    }
    // Numbers stay text: no number of a container's configuration is too large then, and none is rounded.
    yyjson_doc *document =
        yyjson_read_opts(text, length, YYJSON_READ_INSITU | YYJSON_READ_NUMBER_AS_RAW, NULL, &error);
    if (document == NULL)
        refuse(refusal, "%s is no JSON: %s at byte %zu", name, error.msg, error.pos);
    return document;
}

// Finds a member that may be missing. Readers do not agree on what a repeated key means, so it is refused.
static bool find(yyjson_val *object, const char *place, const char *key, yyjson_val **value, struct refusal *refusal)
{
    yyjson_obj_iter members = yyjson_obj_iter_with(object);
    yyjson_val *found;
    *value = NULL;
    while ((found = yyjson_obj_iter_next(&members)) != NULL) {
        if (!yyjson_equals_str(found, key))
            continue;
        if (*value != NULL)
            return refuse(refusal, "%s has \"%s\" twice", place, key);
        *value = yyjson_obj_iter_get_val(found);
    }
    return true;
}

static bool is_text_without_nul(yyjson_val *value)
{
    return yyjson_is_str(value) && memchr(yyjson_get_str(value), '\0', yyjson_get_len(value)) == NULL;
}

static bool is_claim_uid(const char *text)
{
    size_t length = strnlen(text, CLAIM_UID_LENGTH + 1);
    if (length == 0 || length > CLAIM_UID_LENGTH || text[0] == '-')
        return false;
    for (size_t at = 0; at < length; at++) {
        char lower = (char)(text[at] | 0x20);
        if (!(lower >= 'a' && lower <= 'z') && !(text[at] >= '0' && text[at] <= '9') && text[at] != '-')
            return false;
    }
    return true;
}

static bool add_arguments(const char *const arguments[HOOK_ARGUMENTS], struct cpus *allowed, struct refusal *refusal)
{
    if (strcmp(arguments[1], HOOK_FORMAT) != 0)
        return refuse(refusal,
                      "the hook's arguments have the format \"%.20s\", this program knows " HOOK_FORMAT
                      ": the CDI spec is of another version of the driver",
                      arguments[1]);
    if (!is_claim_uid(arguments[2]))
        return refuse(refusal, "the hook's claim UID \"%.80s\" is malformed", arguments[2]);
    if (!cpus_add_list(allowed, arguments[3], strlen(arguments[3])))
        return refuse(refusal, "the hook's cpulist \"%.80s\" is malformed; expected one like 0-3,8", arguments[3]);
    return true;
}

bool check_arguments(const struct hook *hook, struct refusal *refusal)
{
    struct cpus unused = {0};
    return add_arguments(hook->arguments, &unused, refusal);
}

// Reads a process id; 0 if it is none.
static pid_t read_pid(yyjson_val *value)
{
    const char *digits = yyjson_get_raw(value);
    intmax_t pid = 0;
    for (size_t at = 0; digits != NULL && at < yyjson_get_len(value); at++) {
        if (digits[at] < '0' || digits[at] > '9')
            return 0;
        pid = pid * 10 + (digits[at] - '0');
        if (pid > INT_MAX)
            return 0;
    }
    return (pid_t)pid;
}

// No state is refused for its id.
static void read_id(yyjson_val *root, char id[NOTE_NAME_SIZE])
{
    struct refusal unused;
    yyjson_val *value;
    id[0] = '\0';
    if (find(root, "the container's state", "id", &value, &unused) && yyjson_is_str(value) &&
        is_note_name(yyjson_get_str(value), yyjson_get_len(value)))
        memcpy(id, yyjson_get_str(value), yyjson_get_len(value) + 1);
}

static bool read_members(yyjson_val *root, struct state *state, struct refusal *refusal)
{
    static const char place[] = "the container's state";
    yyjson_val *pid;
    yyjson_val *bundle;
    if (!find(root, place, "pid", &pid, refusal) || !find(root, place, "bundle", &bundle, refusal))
        return false;
    state->pid = read_pid(pid);
    if (state->pid == 0)
        return refuse(refusal, "%s has no \"pid\" that is a process id", place);
    if (!is_text_without_nul(bundle) || yyjson_get_str(bundle)[0] != '/')
        return refuse(refusal, "%s has no \"bundle\" that is an absolute path", place);
    if (yyjson_get_len(bundle) >= sizeof state->bundle)
        return refuse(refusal, "%s has a \"bundle\" of %zu bytes; expected a path", place, yyjson_get_len(bundle));
    memcpy(state->bundle, yyjson_get_str(bundle), yyjson_get_len(bundle) + 1);
    read_id(root, state->id);
    return true;
}

bool read_state(char *text, size_t length, struct state *state, struct refusal *refusal)
{
    yyjson_doc *document = parse(text, length, "the container's state", refusal);
    bool good = document != NULL && read_members(yyjson_doc_get_root(document), state, refusal);
    yyjson_doc_free(document);
    return good;
}

// Adds the CPUs of one hook if it is a guard hook of this program. Hooks of others may look like anything.
static bool add_hook(yyjson_val *entry, const struct hook *own, bool *own_found, struct cpus *allowed,
                     struct refusal *refusal)
{
    yyjson_val *path;
    yyjson_val *list;
    const char *arguments[HOOK_ARGUMENTS];
    bool is_own = true;
    if (!yyjson_is_obj(entry))
        return true;
    if (!find(entry, "a createRuntime hook in config.json", "path", &path, refusal) ||
        !find(entry, "a createRuntime hook in config.json", "args", &list, refusal))
        return false;
    if (!yyjson_equals_str(path, own->path) || !yyjson_equals_str(yyjson_arr_get_first(list), HOOK_NAME))
        return true;
    if (yyjson_arr_size(list) != HOOK_ARGUMENTS)
        return refuse(refusal, "a hook in config.json has %zu arguments; expected %d", yyjson_arr_size(list),
                      HOOK_ARGUMENTS);
    for (size_t at = 0; at < HOOK_ARGUMENTS; at++) {
        yyjson_val *argument = yyjson_arr_get(list, at);
        if (!is_text_without_nul(argument))
            return refuse(refusal, "argument %zu of a hook in config.json is no usable string", at);
        arguments[at] = yyjson_get_str(argument);
        is_own = is_own && strcmp(arguments[at], own->arguments[at]) == 0;
    }
    *own_found = *own_found || is_own;
    return add_arguments(arguments, allowed, refusal);
}

bool read_allowed(char *text, size_t length, const struct hook *own, struct cpus *allowed, struct refusal *refusal)
{
    yyjson_doc *document = parse(text, length, "config.json", refusal);
    yyjson_val *root = yyjson_doc_get_root(document);
    yyjson_val *hooks;
    yyjson_val *create_runtime;
    bool own_found = false;
    bool good = document != NULL && find(root, "config.json", "hooks", &hooks, refusal) &&
                find(hooks, "\"hooks\" in config.json", "createRuntime", &create_runtime, refusal);
    if (good) {
        yyjson_arr_iter entries = yyjson_arr_iter_with(create_runtime);
        yyjson_val *entry;
        while (good && (entry = yyjson_arr_iter_next(&entries)) != NULL)
            good = add_hook(entry, own, &own_found, allowed, refusal);
        if (good && !own_found)
            good = refuse(refusal, "config.json has no createRuntime hook with the path %.200s and these arguments",
                          own->path);
    }
    yyjson_doc_free(document);
    return good;
}
