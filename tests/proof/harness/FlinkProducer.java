import java.lang.reflect.Field;
import java.lang.reflect.Method;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Properties;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * What Flink's exactly-once sink does with its producer, without Flink: "flush" writes and flushes a transaction, prints the
 * producer's id and epoch, as they would stand in a checkpoint, and dies; "resume" commits it under these from another process.
 */
public final class FlinkProducer {
    public static void main(String[] arguments) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", arguments[1]);
        settings.put("transactional.id", arguments[2]);
        settings.put("transaction.timeout.ms", "900000");
        settings.put("key.serializer", ByteArraySerializer.class.getName());
        settings.put("value.serializer", ByteArraySerializer.class.getName());
        KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(settings);
        Object manager = of(producer, KafkaProducer.class, "transactionManager").get(producer);
        Field ids = of(manager, manager.getClass(), "producerIdAndEpoch");
        if (arguments[0].equals("flush")) {
            producer.initTransactions();
            producer.beginTransaction();
            for (String value : Arrays.asList(arguments).subList(4, arguments.length)) {
                producer.send(new ProducerRecord<>(arguments[3], value.getBytes(StandardCharsets.UTF_8)));
            }
            producer.flush();
            Object given = ids.get(manager);
            System.out.println(
                    "result " + of(given, given.getClass(), "producerId").get(given)
                            + ":"
                            + of(given, given.getClass(), "epoch").get(given));
            System.out.flush();
            Runtime.getRuntime().halt(137);
        }
        String[] state = arguments[3].split(":");
        move(manager, "INITIALIZING");
        Class<?> type = ids.getType();
        var constructor = type.getDeclaredConstructor(long.class, short.class);
        constructor.setAccessible(true);
        ids.set(manager, constructor.newInstance(Long.parseLong(state[0]), Short.parseShort(state[1])));
        move(manager, "READY");
        move(manager, "IN_TRANSACTION");
        of(manager, manager.getClass(), "transactionStarted").set(manager, true);
        try {
            producer.commitTransaction();
            System.out.println("result committed");
        } catch (RuntimeException refused) {
            System.out.println("result " + refused.getClass().getSimpleName());
        }
        System.out.flush();
        Runtime.getRuntime().halt(0);
    }

    private static Field of(Object owner, Class<?> type, String name) throws Exception {
        Field field = type.getDeclaredField(name);
        field.setAccessible(true);
        return field;
    }

    private static void move(Object manager, String name) throws Exception {
        for (Class<?> inner : manager.getClass().getDeclaredClasses()) {
            if (inner.getSimpleName().equals("State")) {
                Method move = manager.getClass().getDeclaredMethod("transitionTo", inner);
                move.setAccessible(true);
                for (Object state : inner.getEnumConstants()) {
                    if (state.toString().equals(name)) {
                        move.invoke(manager, state);
                    }
                }
            }
        }
    }
}
