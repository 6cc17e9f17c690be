// SPDX-License-Identifier: Apache-2.0
// Feeds mutated documents and arguments to what the start guard reads them with, in the sanitizers' care.
//     fuzz COUNT [SEED]
// The inputs follow from the seed alone, so a failure can be had again. Besides memory errors it looks for what must
// never be: a reader that says yes and leaves nonsense, one that says no without a reason, and one that is not of the
// same mind twice.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpus.h"
#include "documents.h"
#include "notes.h"
#include "third_party/yyjson/yyjson.h"

#define PATH "/var/lib/kubelet/plugins/dra.cpu/start-guard"
#define OWN "{\"path\":\"" PATH "\",\"args\":[\"dracpu-start-guard\",\"v1\",\"3f6c-1d2e\",\"2-5,64\"],\"timeout\":10}"

enum { LARGEST = 64 << 10 };

static const char *const own_arguments[HOOK_ARGUMENTS] = {HOOK_NAME, HOOK_FORMAT, "3f6c-1d2e", "2-5,64"};
static const struct hook own = {.path = PATH, .arguments = own_arguments};

static const char *const states[] = {
    "{\"ociVersion\":\"1.2.0\",\"id\":\"c\",\"status\":\"creating\",\"pid\":4711,\"bundle\":\"/run/b\",\"annotations\":{\"a\":\"b\"}}",
    "{\"pid\":1,\"bundle\":\"/\"}",
    "{\"pid\":7,\"bundle\":\"/b\",\"id\":\"9f86d081884c7d65-A._\\u002e\"}",
    "{\"pid\":2147483647,\"bundle\":\"/\\u0061\\\"\\\\\\/\\ud83d\\ude00\",\"x\":[1e9,-0.5,true,null,{}]}",
};
static const char *const configs[] = {
    "{\"ociVersion\":\"1.2.0\",\"process\":{\"env\":[\"A=b\"],\"args\":[\"sh\"]},\"hooks\":{\"createRuntime\":[" OWN "]}}",
    "{\"hooks\":{\"prestart\":[],\"createRuntime\":[{\"path\":\"/x\",\"args\":[\"x\"]}," OWN ",{\"path\":\"" PATH
    "\",\"args\":[\"dracpu-start-guard\",\"v1\",\"b\",\"0,7-9\"]}]}}",
    "{\"hooks\":{\"createRuntime\":[" OWN "]},\"linux\":{\"resources\":{\"pids\":{\"limit\":18446744073709551615}}}}",
};
static const char *const lists[] = {"0", "0-3,8", "65535", "1-2,4-5,7-65535", "0,2,4,6,8,10,12,14,16,18,20-8191"};
// Pieces that mean something to a reader of JSON, of hooks or of lists.
static const char *const pieces[] = {
    "\"id\":", "/", "..", "../", "{", "}", "[", "]", ",", ":", "\"", "\\", "\\u0000", "\\ud800", "\\u", "null", "true", "1e999", "-", "-0", ".", "0", "99999999999",
    "\"pid\":", "\"bundle\":", "\"hooks\":", "\"createRuntime\":", "\"path\":", "\"args\":", "\"" PATH "\"", "dracpu-start-guard",
    "v1", "v2", "65536", "0-65535", "\n", " ", "\xff", "\xf0\x9f\x98\x80", "\xed\xa0\x80", OWN, "[[[[[[[[[[[[[[[[", "{\"a\":{\"a\":",
};

static uint64_t random_state;

static size_t below(size_t limit)
{
    // xorshift64*
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (size_t)((random_state * UINT64_C(0x2545F4914F6CDD1D)) >> 33) % limit;
}

static size_t mutate(char *text, size_t length)
{
    for (size_t rounds = below(6); rounds > 0; rounds--) {
        size_t at = below(length + 1);
        size_t count = below(8) == 0 ? below(length - at + 1) : below(4) % (length - at + 1);
        const char *piece = pieces[below(sizeof pieces / sizeof *pieces)];
        size_t size = strlen(piece);
        switch (below(6)) {
        case 0: // flip a bit
            if (at < length)
                text[at] = (char)(text[at] ^ (1 << below(8)));
            break;
        case 1: // any byte
            if (at < length)
                text[at] = (char)below(256);
            break;
        case 2: // cut a part out
            memmove(text + at, text + at + count, length - at - count);
            length -= count;
            break;
        case 3: // put a piece in
            if (length + size <= LARGEST) {
                memmove(text + at + size, text + at, length - at);
                memcpy(text + at, piece, size);
                length += size;
            }
            break;
        case 4: // say a part twice
            if (length + count <= LARGEST) {
                memmove(text + at + count, text + at, length - at);
                length += count;
            }
            break;
        default: // cut the end off
            if (below(4) == 0)
                length = at;
        }
    }
    return length;
}

static void must(bool condition, const char *what, const char *text, size_t length)
{
    if (condition)
        return;
    fprintf(stderr, "%s, for: ", what);
    fwrite(text, 1, length, stderr);
    fputc('\n', stderr);
    abort();
}

static void must_be_a_reason(const struct refusal *refusal, const char *text, size_t length)
{
    size_t size = strnlen(refusal->text, sizeof refusal->text);
    must(size > 0 && size < sizeof refusal->text, "refused without a reason", text, length);
    for (size_t at = 0; at < size; at++)
        must(refusal->text[at] >= ' ' && refusal->text[at] <= '~', "a reason that does not print", text, length);
}

// A copy of exactly the promised size, so that AddressSanitizer sees every byte that is read beyond it.
static char *copy(const char *text, size_t length)
{
    char *exact = calloc(1, length + YYJSON_PADDING_SIZE);
    memcpy(exact, text, length);
    return exact;
}

static void try_state(const char *text, size_t length)
{
    struct refusal refusal = {{0}};
    struct state *state = calloc(1, sizeof *state);
    char *document = copy(text, length);
    if (read_state(document, length, state, &refusal)) {
        must(state->pid > 0, "a pid that is none", text, length);
        must(state->bundle[0] == '/' && memchr(state->bundle, 0, sizeof state->bundle), "no path", text, length);
        size_t named = strnlen(state->id, sizeof state->id);
        must(named == 0 || (is_note_name(state->id, named) && memchr(state->id, '/', named) == NULL && state->id[0] != '.'),
             "no file name", text, length);
    } else {
        must_be_a_reason(&refusal, text, length);
    }
    free(document);
    free(state);
}

static bool try_config(const char *text, size_t length)
{
    struct refusal refusal = {{0}};
    struct cpus *allowed = calloc(1, sizeof *allowed);
    struct cpus own_cpus = {{0}};
    char *document = copy(text, length);
    bool good = read_allowed(document, length, &own, allowed, &refusal);
    cpus_add_list(&own_cpus, own_arguments[3], strlen(own_arguments[3]));
    if (good)
        must(cpus_within(&own_cpus, allowed), "without the own hook's CPUs", text, length);
    else
        must_be_a_reason(&refusal, text, length);
    free(document);
    free(allowed);
    return good;
}

static void try_note(const struct cpus *used, const struct cpus *allowed, const char *text, size_t length)
{
    char *note = malloc(NOTE_SIZE);
    size_t size = format_note(used, allowed, note);
    must(size == strnlen(note, NOTE_SIZE) && size < NOTE_SIZE, "a note without an end", text, length);
    must(memchr(note, '\n', size) == note + size - 1, "a note of another number of lines", text, length);
    free(note);
}

static bool try_list(const char *text, size_t length)
{
    struct cpus *cpus = calloc(1, sizeof *cpus);
    struct cpus *again = calloc(1, sizeof *again);
    char *exact = malloc(length + 1);
    char canonical[CPUS_TEXT_SIZE];
    bool good;
    memcpy(exact, text, length);
    exact[length] = '\0';
    exact = realloc(exact, length == 0 ? 1 : length);
    good = cpus_add_list(cpus, exact, length);
    cpus_format(cpus, canonical);
    must(strnlen(canonical, sizeof canonical) < sizeof canonical, "a list without an end", text, length);
    try_note(cpus, cpus, text, length);
    if (good) {
        must(!cpus_are_none(cpus), "a list of no CPUs", text, length);
        if (strstr(canonical, "...") == NULL) {
            must(cpus_add_list(again, canonical, strlen(canonical)), "an own list that is none", text, length);
            must(cpus_within(cpus, again) && cpus_within(again, cpus), "another set when read again", text, length);
        }
    }
    free(exact);
    free(again);
    free(cpus);
    return good;
}

int main(int count, char **arguments)
{
    static char text[LARGEST + 64];
    uintmax_t inputs = count > 1 ? strtoumax(arguments[1], NULL, 10) : 100000;
    uintmax_t good_configs = 0;
    uintmax_t good_lists = 0;
    random_state = count > 2 ? strtoull(arguments[2], NULL, 10) : 1;
    random_state = random_state * 2 + 1;
    for (uintmax_t input = 0; input < inputs; input++) {
        const char *seed;
        size_t length;
        switch (input % 4) {
        case 0:
            seed = states[below(sizeof states / sizeof *states)];
            length = mutate(memcpy(text, seed, strlen(seed)), strlen(seed));
            try_state(text, length);
            break;
        case 1:
            seed = lists[below(sizeof lists / sizeof *lists)];
            length = mutate(memcpy(text, seed, strlen(seed)), strlen(seed));
            good_lists += try_list(text, length);
            break;
        default:
            seed = configs[below(sizeof configs / sizeof *configs)];
            length = mutate(memcpy(text, seed, strlen(seed)), strlen(seed));
            good_configs += try_config(text, length);
        }
    }
    // Inputs of which all are good, or none, would look for nothing.
    must(good_configs > 0 && good_configs < inputs / 2 && good_lists > 0, "the inputs are not mixed", "", 0);
    printf("%ju inputs, %ju good configurations, %ju good lists\n", inputs, good_configs, good_lists);
    return 0;
}
