# fish completion of agentgrpo, written by `agentgrpo completion fish`.
# <words>
function __agentgrpo
    set -l before (commandline -opc)
    set -l word (commandline -ct)
    set -l known $_agentgrpo_commands
    set -l place
    if set -q before[2]
        set -l command $before[2]
        contains -- $command $_agentgrpo_commands; and not string match -q -- '-*' $command; or return
        set -l values _agentgrpo_value_$command
        if contains -- $before[-1] $$values
            __fish_complete_path $word
            return
        end
        set -l words _agentgrpo_words_$command
        set known $$words
        set -l where _agentgrpo_place_$command
        set place $$where
    end
    set -l length (string length -- $word)
    set -l found (for name in $known
        test $length -eq 0; or test "$word" = (string sub -l $length -- $name); or continue
        if string match -q -- '-*' $name; and not string match -q -- '-*' $word
            continue
        end
        if string match -q -- '*=*' $name # a part of a key at a time
            set -l rest (string sub -s (math $length + 1) -- $name)
            test -n "$rest"; and echo $word(string match -r -- '^[^.=]*[.=]?' $rest)
        else
            echo $name
        end
    end | sort -u)
    printf '%s\n' $found
    if string match -q -- '-*' $word
        return
    else if test "$place" = runs
        __fish_complete_directories $word ''
    else if test "$place" = config; and not set -q before[3]
        __fish_complete_suffix $word .toml
    else if not set -q found[1]
        set -l key (string match -r -- '^.*=' $word)
        for path in (__fish_complete_path (string sub -s (math (string length -- "$key") + 1) -- $word))
            echo $key$path
        end
    end
end
complete -c agentgrpo -f -a '(__agentgrpo)'
